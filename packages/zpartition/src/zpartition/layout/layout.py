"""Layout: the position of each named parameter in flat space, and the rank that owns each span.

Problem.  ZeRO shards the *concatenation* of parameters, so a rank's shard may cut a tensor at any element.
Reduction, optimizer shards, all-gathers, memory estimates and checkpoints must agree on the cuts.

Design.  One pure, frozen value, computed once and read by everyone.  Parameters are packed into buckets in reverse
registration order, because backward produces gradients roughly in that order.  A bucket holds one dtype (on the wire,
too) and one parameter group, is padded to a multiple of `world_size * SPAN_ALIGNMENT`, and is cut into equal spans:
shard i is [i * s, (i + 1) * s) of *every* bucket (`Bucket.span` maps ranks to shards), so each bucket can be reduced
and gathered by itself.  The padding does not depend on the stage, so the blocks over which norms are summed are
equal: see zprecision/inspect.py for what makes stages bitwise equal.

Rejected.  One flat space over all parameters with a single cut per rank (the last rank's buckets finish first, and a
bucket may have many owners); a shard per tensor (thousands of collectives, or padding per tensor).
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

import attrs
import torch

from zpartition.layout.address import Address

SLOT_ALIGNMENT = 16  # elements: fp32 views start on 64-byte lines, so vector kernels have no unaligned head
SPAN_ALIGNMENT = 1024  # elements: the block of the norm; a block never straddles two ranks
CODE_DTYPES = frozenset((torch.uint8, torch.int8))  # of the codes of quantized weights, which are frozen
CODE_ALIGNMENT = 256  # bytes: so a block of codes (at most 256, a power of two) lies in one rank's span
_DERIVED_MIN_NUMEL, _DERIVED_MAX_NUMEL, _DERIVED_BUCKETS = 1 << 18, 1 << 25, 8


@attrs.frozen
class ParamSpec:
    """One trainable parameter as input of `plan_layout`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int = 0  # index of the optimizer's parameter group
    unit: str | None = None  # module that it is gathered with (stage 3); None: never gathered
    is_sparse: bool = False  # its gradient is sparse (rows)
    wire: torch.dtype | None = None  # dtype of its gradient on the wire; None: as the policy says
    address: Address = attrs.field(default=attrs.Factory(lambda self: Address.whole(self.shape), takes_self=True))
    num_expert_shards: int = 1  # this many consecutive ranks hold different parts of it (experts)

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar, 0 when a dimension is empty."""
        return torch.Size(self.shape).numel()

    @property
    def planned_numel(self) -> int:
        """Number of elements by which a bucket closes, the same on all expert-parallel ranks."""
        return mean_numel(self.numel, self.address, self.num_expert_shards)


@attrs.frozen
class Slot:
    """Position of a parameter in its bucket: elements [offset, offset + numel)."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    address: Address = attrs.field(default=attrs.Factory(lambda self: Address.whole(self.shape), takes_self=True))

    @property
    def is_elsewhere(self) -> bool:
        """True if other ranks hold all of it: it gets no gradient here."""
        return not self.numel and self.address.is_elsewhere

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


@attrs.frozen(cache_hash=True)
class Bucket:
    """Parameters of one dtype, group, unit and wire dtype: flat, padded, and cut into `num_shards` equal spans."""

    index: int  # and order of reduction
    dtype: torch.dtype
    group: int
    slots: tuple[Slot, ...]
    numel: int  # with padding
    num_shards: int
    unit: str | None = None  # of all its parameters, see ParamSpec
    is_sparse: bool = False  # one parameter, whose gradient is reduced as sparse rows
    wire: torch.dtype | None = None  # of all its gradients, see ParamSpec
    copy: int = 0  # of all its parameters, see Address: gradients of copy 0 count in norms
    num_expert_shards: int = 1  # of all its parameters, see ParamSpec: one of so many consecutive ranks holds them

    @property
    def span_numel(self) -> int:
        """Number of elements that one rank owns."""
        return self.numel // self.num_shards

    def span(self, rank: int) -> tuple[int, int]:
        """Return [lo, hi) of the bucket that `rank` (of the world) owns; the whole bucket if there is one shard."""
        owner = rank // self.num_expert_shards % self.num_shards
        return owner * self.span_numel, (owner + 1) * self.span_numel

    def pieces(self, rank: int) -> Iterator[Piece]:
        """Yield the parameters' parts inside the span of `rank`, in slot order."""
        lo, hi = self.span(rank)
        for slot in self.slots:
            start, stop = max(lo, slot.offset), min(hi, slot.end)
            if start < stop or (slot.numel == 0 and lo <= slot.offset < hi):
                yield Piece(slot, (start - slot.offset, max(stop, start) - slot.offset), start - lo)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield the runs [lo, hi) that no parameter uses; they must stay zero in gradients."""
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
        """Number of parameters, without padding."""
        return sum(slot.numel for bucket in self.buckets for slot in bucket.slots)

    @property
    def is_expert_sharded(self) -> bool:
        """True if ranks hold different parts of some parameters (experts)."""
        return any(bucket.num_expert_shards > 1 for bucket in self.buckets)

    @property
    def names(self) -> frozenset[str]:
        """Names of all parameters."""
        return frozenset(slot.name for _, slot in self.slots())

    @property
    def padded_numel(self) -> int:
        """Elements of all flat buffers, with padding."""
        return sum(bucket.numel for bucket in self.buckets)

    @property
    def shard_numel(self) -> int:
        """Elements of all buckets that one rank owns, with padding."""
        return sum(bucket.span_numel for bucket in self.buckets)

    def slots(self) -> Iterator[tuple[Bucket, Slot]]:
        """Yield every parameter with its bucket."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                yield bucket, slot


def mean_numel(numel: int, address: Address, num_expert_shards: int) -> int:
    """Return the mean over expert-parallel ranks of the elements of a parameter, of which this rank holds `numel`.

    It differs from `numel` for the experts of a list, of which each is whole on one rank and empty on the others.
    """
    whole = torch.Size(address.global_shape).numel()
    return whole // num_expert_shards if num_expert_shards > 1 and numel in (0, whole) else numel


def derive_bucket_numel(total_numel: int) -> int:
    """Return a bucket size for a model of `total_numel` parameters.

    Eight buckets leave seven to overlap with backward.  Below 2^18 elements latency dominates the cost of a message;
    above 2^25 larger messages gain nothing and the buffer costs memory.
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

    A bucket closes when the next parameter would exceed `bucket_numel` elements (0: derived); a larger parameter
    gets its own bucket.  A unit has one bucket for each dtype, group and wire dtype, of any size, and all its
    parameters are gathered together.  `alignment`: every slot begins at a multiple of this number of elements; a slot
    of codes begins at one of `CODE_ALIGNMENT`, too, so no block of codes is cut between ranks.

    Raises:
        ValueError: two parameters share a name, `num_shards` does not divide `world_size`, or the ranks that hold one
            copy of the weights do not hold all experts.
    """
    if num_shards < 1 or world_size % num_shards:
        raise ValueError(f"num_shards must divide world_size ({world_size}), got {num_shards}")
    for spec in specs:
        if spec.num_expert_shards > 1 and num_shards > 1 and num_shards % spec.num_expert_shards:
            raise ValueError(
                f"{spec.name} is sharded over {spec.num_expert_shards} expert-parallel ranks, which do not divide "
                f"the {num_shards} ranks that hold one copy of the weights: choose a shard_group_size that is a "
                f"multiple of {spec.num_expert_shards}, or 0 for all ranks."
            )
    _check_duplicates([spec.name for spec in specs])
    limit = bucket_numel or derive_bucket_numel(sum(spec.planned_numel for spec in specs))
    packed: list[_OpenBucket] = []
    filling: dict[tuple[object, ...], _OpenBucket] = {}
    for position, spec in enumerate(reversed(specs)):
        kind = spec.dtype, spec.wire, spec.address.num_copies > 1
        key = (spec.unit, spec.name if spec.is_sparse else "", spec.group, spec.num_expert_shards, *kind)
        run = filling.get(key)
        if run is None or (spec.unit is None and run.planned_numel + spec.planned_numel > limit):
            is_code = spec.dtype in CODE_DTYPES
            run = filling[key] = _OpenBucket(max(alignment, CODE_ALIGNMENT) if is_code else alignment)
            packed.append(run)
        run.add(spec, position)
    packed.sort(key=lambda run: run.last_position)  # a bucket is complete when its last parameter is
    return Layout(
        buckets=tuple(run.bucket(index, world_size, num_shards) for index, run in enumerate(packed)),
        world_size=world_size,
        num_shards=num_shards,
    )


@attrs.define(eq=False)
class _OpenBucket:
    """A bucket under construction."""

    alignment: int  # of slots, in elements
    specs: list[ParamSpec] = attrs.field(factory=list)
    slots: list[Slot] = attrs.field(factory=list)
    numel: int = 0  # elements so far, each slot aligned
    planned_numel: int = 0  # the same in the mean over expert-parallel ranks
    last_position: int = -1  # of the newest parameter, in reverse registration order

    def add(self, spec: ParamSpec, position: int) -> None:
        self.specs.append(spec)
        self.slots.append(Slot(spec.name, spec.shape, self.numel, spec.numel, spec.address))
        self.numel += _round_up(spec.numel, self.alignment)
        self.planned_numel += _round_up(spec.planned_numel, self.alignment)
        self.last_position = position

    def bucket(self, index: int, world_size: int, num_shards: int) -> Bucket:
        return Bucket(
            index=index,
            dtype=self.specs[0].dtype,
            group=self.specs[0].group,
            slots=tuple(self.slots),
            numel=_round_up(max(self.numel, 1), world_size * SPAN_ALIGNMENT),
            num_shards=max(1, num_shards // self.specs[0].num_expert_shards),
            unit=self.specs[0].unit,
            is_sparse=self.specs[0].is_sparse,
            wire=self.specs[0].wire,
            copy=self.specs[0].address.copy,
            num_expert_shards=self.specs[0].num_expert_shards,
        )


def _check_duplicates(names: Sequence[str]) -> None:
    repeated = [name for name, count in collections.Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f"parameter names must be unique; repeated: {', '.join(repeated)}")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
