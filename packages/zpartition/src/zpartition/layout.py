"""Layout: where each named parameter lives in flat space, and which rank owns which span.

Problem.  ZeRO splits the *concatenation* of parameters, so a rank's share cuts through tensors at any
element.  Reduction, optimizer shards, gathering, memory estimates and checkpoints must all agree on the cuts.

Design.  One pure, frozen value, made once and read by everyone.  Parameters are packed into buckets, in the
reverse of their registration order because backward meets them roughly in that order.  A bucket holds one
dtype (on the wire, too) and one parameter group, is padded to a multiple of `world_size * SPAN_ALIGNMENT`, and is cut
into equal spans: rank r owns [r * s, (r + 1) * s) of *every* bucket, so each can be reduced and gathered by itself.
The same padding is used when nothing is sharded (one span), so that stages differ in ownership only and the
blocks over which norms are summed are the same: that is what makes stages bitwise equal.

Rejected.  One flat space over all parameters with a single cut per rank (the last rank's buckets finish first
and a bucket may belong to many owners); a shard per tensor (thousands of collectives, or padding per tensor).
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

import attrs
import torch

from zpartition.shard import Address

SLOT_ALIGNMENT = 16  # elements: views start on 64-byte lines in fp32, so vector kernels meet no ragged head
SPAN_ALIGNMENT = 1024  # elements: the block of the norm; a block never straddles two ranks
_DERIVED_MIN_NUMEL, _DERIVED_MAX_NUMEL, _DERIVED_BUCKETS = 1 << 18, 1 << 25, 8


@attrs.frozen
class ParamSpec:
    """One trainable parameter as the layout sees it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int = 0  # index of the optimizer's parameter group
    unit: str | None = None  # the module that it is gathered with (stage 3); None: never gathered
    is_sparse: bool = False  # its gradient comes as rows
    wire: torch.dtype | None = None  # what its gradient travels in; None: as the policy says of all
    address: Address = attrs.field(default=attrs.Factory(lambda self: Address.whole(self.shape), takes_self=True))
    deal: int = 1  # runs of so many ranks have different parts of it (experts)

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar, 0 when a dimension is empty."""
        return torch.Size(self.shape).numel()


@attrs.frozen
class Slot:
    """A parameter's place in its bucket: elements [offset, offset + numel)."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    address: Address = attrs.field(default=attrs.Factory(lambda self: Address.whole(self.shape), takes_self=True))

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.offset + self.numel


@attrs.frozen
class Piece:
    """The part of one parameter that one rank owns.

    `span` is [lo, hi) in the flattened parameter; its first element is element `offset` of the rank's shard.
    """

    slot: Slot
    span: tuple[int, int]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements; never 0 unless the parameter itself is empty."""
        return self.span[1] - self.span[0]


@attrs.frozen
class Bucket:
    """A flat run of parameters of one dtype, group, unit and wire, padded, cut into `num_shards` equal spans."""

    index: int  # also the order in which buckets are reduced
    dtype: torch.dtype
    group: int
    slots: tuple[Slot, ...]
    numel: int  # padding included
    num_shards: int
    unit: str | None = None  # of all its parameters, see ParamSpec
    is_sparse: bool = False  # one parameter, whose gradient is exchanged as rows
    wire: torch.dtype | None = None  # of all its gradients, see ParamSpec
    copy: int = 0  # of all its parameters, see Address: gradients of copy 0 count in norms
    deal: int = 1  # of all its parameters, see ParamSpec: one rank of each run of so many has these

    @property
    def span_numel(self) -> int:
        """Elements that one rank owns."""
        return self.numel // self.num_shards

    def span(self, rank: int) -> tuple[int, int]:
        """[lo, hi) of the bucket that `rank` (of all) owns; everything when there is one shard."""
        owner = rank // self.deal % self.num_shards
        return owner * self.span_numel, (owner + 1) * self.span_numel

    def pieces(self, rank: int) -> Iterator[Piece]:
        """The parameters' parts inside the span of `rank`, in slot order."""
        lo, hi = self.span(rank)
        for slot in self.slots:
            start, stop = max(lo, slot.offset), min(hi, slot.end)
            if start < stop or (slot.numel == 0 and lo <= slot.offset < hi):
                yield Piece(slot, (start - slot.offset, max(stop, start) - slot.offset), start - lo)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """The runs [lo, hi) that no parameter uses; they must stay zero in gradients."""
        position = 0
        for slot in self.slots:
            if slot.offset > position:
                yield position, slot.offset
            position = slot.end
        if position < self.numel:
            yield position, self.numel


@attrs.frozen
class Layout:
    """All buckets of one model under one policy."""

    buckets: tuple[Bucket, ...]
    world_size: int
    num_shards: int  # ranks that hold one copy together; 1 when nothing is sharded

    @property
    def numel(self) -> int:
        """Parameters, without padding."""
        return sum(slot.numel for bucket in self.buckets for slot in bucket.slots)

    @property
    def is_dealt(self) -> bool:
        """Whether ranks have different parts of some parameters."""
        return any(bucket.deal > 1 for bucket in self.buckets)

    @property
    def names(self) -> frozenset[str]:
        """Of all parameters."""
        return frozenset(slot.name for _, slot in self.slots())

    @property
    def padded_numel(self) -> int:
        """Elements of all flat buffers, padding included."""
        return sum(bucket.numel for bucket in self.buckets)

    @property
    def shard_numel(self) -> int:
        """Elements of all buckets that one rank owns, padding included."""
        return sum(bucket.span_numel for bucket in self.buckets)

    def slots(self) -> Iterator[tuple[Bucket, Slot]]:
        """Every parameter with its bucket."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                yield bucket, slot


def derive_bucket_numel(total_numel: int) -> int:
    """A bucket size fit for a model of `total_numel` parameters.

    Eight buckets leave seven to hide behind backward; below 2^18 elements a message costs more than its
    bytes, above 2^25 nothing is gained and the buffer hurts.
    """
    return min(max(total_numel // _DERIVED_BUCKETS, _DERIVED_MIN_NUMEL), _DERIVED_MAX_NUMEL)


def plan_layout(
    specs: Sequence[ParamSpec],
    *,
    world_size: int,
    num_shards: int,
    bucket_numel: int = 0,
    alignment: int = SLOT_ALIGNMENT,
) -> Layout:
    """Pack `specs` (in registration order) into buckets; pure and deterministic.

    A bucket closes when the next parameter would exceed `bucket_numel` elements (0: derived); a parameter
    larger than that has a bucket of its own.  A unit has one bucket for each dtype, group and wire, however large,
    and all its parameters are gathered together.  `alignment`: every slot begins at a multiple of so many elements.

    Raises:
        ValueError: two parameters share a name, `num_shards` does not divide `world_size`, or the ranks that hold one
            copy of the weights do not hold all experts.
    """
    if num_shards < 1 or world_size % num_shards:
        raise ValueError(f"num_shards must divide world_size ({world_size}), got {num_shards}")
    for spec in specs:
        if spec.deal > 1 and num_shards > 1 and num_shards % spec.deal:
            raise ValueError(
                f"{spec.name} is dealt out to runs of {spec.deal} ranks, and {num_shards} ranks hold one copy of the "
                f"weights (shard_group_size): choose a multiple of {spec.deal}, or 0 for all ranks."
            )
    _refuse_duplicates([spec.name for spec in specs])
    limit = bucket_numel or derive_bucket_numel(sum(spec.numel for spec in specs))
    runs: list[_Run] = []
    filling: dict[tuple[object, ...], _Run] = {}
    for position, spec in enumerate(reversed(specs)):
        kind = spec.dtype, spec.wire, spec.address.num_copies > 1
        key = (spec.unit, spec.name if spec.is_sparse else "", spec.group, spec.deal, *kind)
        run = filling.get(key)
        if run is None or (spec.unit is None and run.numel + spec.numel > limit):
            run = filling[key] = _Run(alignment)
            runs.append(run)
        run.add(spec, position)
    runs.sort(key=lambda run: run.last_position)  # a bucket is complete when its last parameter is
    return Layout(
        buckets=tuple(run.bucket(index, world_size, num_shards) for index, run in enumerate(runs)),
        world_size=world_size,
        num_shards=num_shards,
    )


@attrs.define(eq=False)
class _Run:
    """A bucket being packed."""

    alignment: int  # of slots, in elements
    specs: list[ParamSpec] = attrs.field(factory=list)
    slots: list[Slot] = attrs.field(factory=list)
    numel: int = 0  # elements so far, each slot aligned
    last_position: int = -1  # of the newest parameter, in reverse registration order

    def add(self, spec: ParamSpec, position: int) -> None:
        self.specs.append(spec)
        self.slots.append(Slot(spec.name, spec.shape, self.numel, spec.numel, spec.address))
        self.numel += _round_up(spec.numel, self.alignment)
        self.last_position = position

    def bucket(self, index: int, world_size: int, num_shards: int) -> Bucket:
        return Bucket(
            index=index,
            dtype=self.specs[0].dtype,
            group=self.specs[0].group,
            slots=tuple(self.slots),
            numel=_round_up(max(self.numel, 1), world_size * SPAN_ALIGNMENT),
            num_shards=max(1, num_shards // self.specs[0].deal),
            unit=self.specs[0].unit,
            is_sparse=self.specs[0].is_sparse,
            wire=self.specs[0].wire,
            copy=self.specs[0].address.copy,
            deal=self.specs[0].deal,
        )


def _refuse_duplicates(names: Sequence[str]) -> None:
    repeated = [name for name, count in collections.Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f"parameter names must be unique, these are not: {', '.join(repeated)}")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
