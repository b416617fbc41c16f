"""ZeRO policies: frozen values that say what is sharded, when gradients are reduced, and where states live.

Two questions define the stages up to 2: *what is kept* (full gradients, or this rank's shard) and *when gradients are
reduced*.  Stage 0 keeps everything, stage 1 shards the optimizer states, stage 2 the gradients, too.  Stages are
therefore not classes: one reducer reads this policy.  Stage 3 is stage 2 with sharded weights, which are gathered
while a module needs them.

When to reduce
--------------
`ReduceAt.MICRO_STEP` reduces after each backward and adds the result to the accumulator: sum over micro-steps of (sum
over ranks).  `ReduceAt.BOUNDARY` accumulates locally and reduces once: sum over ranks of (sum over micro-steps).  The
two differ in the last bits, and no reordering of messages can hide it.  The first is the default here at every stage:
then stages 0, 1 and 2 give the same bits, and changing the stage of a run does not change its losses.  The second
divides the traffic by the number of micro-steps at stages 0 and 1 and costs a full local gradient in the dtype of the
accumulators; stage 2 rejects it, because sharding that gradient is its purpose.  `ReduceAt.BATCH` is the second for
pipelines, which run several micro-batches at a time: a rank holds full gradients of its layers while it does, at
every stage.

Offload
-------
A *tier* is a kind of memory.  Training needs optimizer states once a step and gradients in between, so both may live
in slower memory if copies overlap with computation (ZeRO-Offload, Ren et al. 2021; ZeRO-Infinity, Rajbhandari et al.
2021).  `Offload()` moves nothing: it is the null object of `ZeroPolicy.offload`.  The tier is taken literally: for a
module on the CPU, HOST is other CPU memory, with real copies.  This is useful for tests, which need no accelerator.

Placement is by bucket.  `ratio` of the elements leaves the device (Twin-Flow of ZeRO-Offload++), first the buckets
whose gradients come first: those of the last buckets, whose transfer backward cannot hide, stay.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence

import attrs
import torch
from attrs.validators import and_, ge, gt, in_, instance_of, le, optional

from zpartition.layout.layout import Bucket
from zpartition.layout.selective import EVERY_ELEMENT, SelectivePolicy

__all__ = [
    "MEAN",
    "NOTHING",
    "Averaging",
    "BucketSizing",
    "Offload",
    "OffloadStateType",
    "ReduceAt",
    "SparseGradients",
    "Speculation",
    "Tier",
    "ZeroPolicy",
    "step_groups",
]


PAGE_BYTES = 4096


class Tier(enum.Enum):
    """Kind of memory."""

    DEVICE = "device"  # the device of the module
    HOST = "host"  # CPU memory, pinned where the module's device is CUDA
    DISK = "disk"  # files; CPU memory for the buckets being updated, read and written


class OffloadStateType(enum.Enum):
    """States that `Partition.offload_states` moves; the values are DeepSpeed's names."""

    STATES = "optim_states"  # optimizer states
    MASTERS = "hp_params"  # full-precision copies, where the weights are narrower
    WEIGHTS = "lp_params"  # full weights, or this rank's shards
    GRADIENTS = "lp_grads"  # accumulators
    BUFFERS = "contiguous_grad_buffer"  # of gradients in flight, and of gathered units


class Speculation(enum.Enum):
    """When the optimizer updates states before gradients are known to be finite (SuperOffload, Lian et al. 2025)."""

    OFF = "off"
    LAST_BACKWARD = "last backward"  # a thread steps each reduced bucket: costs a copy of the host states


@attrs.frozen(kw_only=True)
class Offload:
    """States and weights that leave the device.

    Raises:
        ValueError: the combination has no meaning.
    """

    states: Tier = Tier.DEVICE  # masters and optimizer states; gradient accumulators then live on the host
    weights: Tier = Tier.DEVICE  # shards of weights at stage 3
    ratio: float = attrs.field(default=1.0, validator=and_(ge(0.0), le(1.0)))  # share of the states that leaves
    step_numel: int = attrs.field(default=0, validator=ge(0))  # elements of one step call, at least a bucket
    buffer_count: int = attrs.field(
        default=3, validator=ge(2)
    )  # step calls whose states are in memory at once (DISK)
    pin: bool = attrs.field(default=True, validator=instance_of(bool))  # page-locked host memory on CUDA
    directory: str = ""  # for DISK: local and fast; each rank creates its own folder in it
    num_threads: int = attrs.field(default=1, validator=ge(1))  # (DISK), see `num_calls`
    queue_depth: int = attrs.field(default=8, validator=ge(1))  # (DISK), see `num_calls`
    block_bytes: int = attrs.field(default=1 << 20, validator=and_(ge(1), le(1 << 30)))  # (DISK), see `call_bytes`
    host_weight_numel: int = attrs.field(default=0, validator=ge(0))  # (DISK) of weights
    weight_buffer_count: int = attrs.field(default=5, validator=ge(1))  # (DISK) host buffers for weights
    weight_buffer_numel: int = attrs.field(default=100_000_000, validator=ge(1))  # of each
    speculation: Speculation = Speculation.OFF
    core_share: float = attrs.field(default=0.0, validator=and_(ge(0.0), le(1.0)))  # see `num_cores`
    selective: SelectivePolicy = EVERY_ELEMENT

    def __attrs_post_init__(self) -> None:
        if Tier.DISK in (self.states, self.weights) and not self.directory:
            raise ValueError(
                'Offload(states or weights=Tier.DISK) needs a directory to write to: directory="/fast/local/folder"'
            )
        if self.speculation is not Speculation.OFF and self.states is not Tier.HOST:
            raise ValueError(
                f"Offload(speculation={self.speculation.name}, states={self.states.name}): only states on the host "
                "can be updated during backward and rolled back. Use states=Tier.HOST, or Speculation.OFF."
            )
        if self.selective.is_on:
            self._check_selective()

    def _check_selective(self) -> None:
        reasons = {
            f"states={self.states.name}": self.states is not Tier.HOST,
            f"ratio={self.ratio}": self.ratio < 1,
            f"weights={self.weights.name}": self.weights is not Tier.DEVICE,
            f"speculation={self.speculation.name}": self.speculation is not Speculation.OFF,
        }
        found = [reason for reason, is_true in reasons.items() if is_true]
        if found:
            raise ValueError(
                f"Offload(selective=SelectivePolicy(...), {', '.join(found)}): selective updates keep columns of the "
                "weights on the device and the whole of masters and states on the host. Use states=Tier.HOST, and "
                "leave the others out."
            )

    @property
    def weight_staging_numel(self) -> int:
        """Elements of weights that pass through host memory at once; a larger shard passes alone."""
        return self.weight_buffer_count * self.weight_buffer_numel

    @property
    def num_calls(self) -> int:
        """Calls that read or write files at the same time, each in a thread of its own."""
        return self.num_threads * self.queue_depth

    @property
    def call_bytes(self) -> int:
        """Bytes of one of these calls: `block_bytes`, rounded up to whole pages, which O_DIRECT requires."""
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES

    def num_cores(self, usable: int) -> int:
        """Return the threads of a speculative step on `usable` cores; 0: as many as torch uses."""
        return max(1, int(self.core_share * usable)) if self.core_share else 0

    def keeps_on_host(self, kept: int, numel: int) -> bool:
        """Return whether the next shard of weights, `numel` elements, stays on the host beside `kept` that do."""
        return self.weights is Tier.DISK and kept + numel <= self.host_weight_numel

    @property
    def moves_states(self) -> bool:
        """True if any optimizer state leaves the device."""
        return self.states is not Tier.DEVICE and self.ratio > 0

    @property
    def moves_all_states(self) -> bool:
        """True if no optimizer state stays on the device."""
        return self.moves_states and self.ratio == 1

    def place(self, numels: Sequence[int]) -> tuple[Tier, ...]:
        """Return the tier of the states of each bucket from their elements, as close to `ratio` as possible."""
        tiers: list[Tier] = []
        target, gone = self.ratio * sum(numels), 0
        for numel in numels:
            leaves = self.moves_states and gone + numel / 2 < target
            tiers.append(self.states if leaves else Tier.DEVICE)
            gone += numel if leaves else 0
        return tuple(tiers)


NOTHING = Offload()


def step_groups(tiers: Sequence[Tier], numels: Sequence[int], step_numel: int) -> tuple[tuple[int, ...], ...]:
    """Return the buckets that each call of the optimizer's step updates, in order; every bucket once.

    Buckets on the device come first, in one call: a GPU updates them while the host updates the others, which are
    grouped by `step_numel` elements, and at least one.
    """
    device = tuple(index for index, tier in enumerate(tiers) if tier is Tier.DEVICE)
    groups = [device] if device else []
    group: list[int] = []
    size = 0
    for index, tier in enumerate(tiers):
        if tier is Tier.DEVICE:
            continue
        if group and size + numels[index] > step_numel:
            groups.append(tuple(group))
            group, size = [], 0
        group.append(index)
        size += numels[index]
    return tuple([*groups, tuple(group)] if group else groups)


class ReduceAt(enum.Enum):
    """When local gradients are reduced."""

    MICRO_STEP = "micro_step"  # after every backward: traffic x accumulation steps, no full local gradient
    BOUNDARY = "boundary"  # after the last backward of a step: traffic x 1, one full local gradient
    BATCH = "batch"  # as BOUNDARY at any stage, for pipelines


class SparseGradients(enum.Enum):
    """Treatment of the gradients of embeddings created with sparse=True."""

    ROWS = "rows"  # gathered as (indices, values), after an exchange of lengths
    DENSE = "dense"  # written into a bucket, as other gradients


class BucketSizing(enum.Enum):
    """Choice of a bucket's size."""

    DERIVED = "derived"  # from the model's size: bits depend on the config only
    MEASURED = "measured"  # at most that, for the network between hosts: see link.py


@attrs.frozen(kw_only=True)
class Averaging:
    """Conversion of the sum over ranks into a mean, and on which side of the reduction the division happens.

    Dividing after the sum keeps small values exact in half precision, dividing before keeps large sums from
    overflowing; `predivide` splits the division between the two.
    """

    operation: str = attrs.field(default="mean", validator=in_(("mean", "sum")))
    prescale: bool = attrs.field(default=False, validator=instance_of(bool))  # divide by the world before
    predivide: float = attrs.field(default=1.0, validator=gt(0))  # part of the division done before the sum

    def factors(self, world_size: int) -> tuple[float, float]:
        """Return the multipliers (before, after) the sum over `world_size` ranks."""
        if self.operation == "sum" or world_size == 1:
            return 1.0, 1.0
        if self.prescale:
            return 1.0 / world_size, 1.0
        return 1.0 / self.predivide, self.predivide / world_size


MEAN = Averaging()


@attrs.frozen(kw_only=True)
class ZeroPolicy:
    """Policy of one partition (Rajbhandari et al. 2020, sections 5.1-5.2).

    With P parameters, W ranks and fp32 accumulators, a rank holds after a step: at stage 0, P weights, P gradients, P
    states; at stages 1 and 2, P weights, P/W gradients, P/W states; at stage 3, P/W of each, and gathered units.  The
    fields from `unit_numel` on belong to stage 3.  With shard groups smaller than the world, W is their size.

    Raises ValueError for a field out of its range, and for fields that exclude each other; the message names both.

    >>> import zpartition
    >>> policy = zpartition.ZeroPolicy(stage=3, offload=zpartition.Offload(states=zpartition.Tier.HOST))
    >>> policy.stage
    3
    """

    stage: int = attrs.field(default=0, validator=in_((0, 1, 2, 3)))
    bucket_numel: int = attrs.field(default=0, validator=ge(0))  # 0: derived from the model's size
    bucket_sizing: BucketSizing = BucketSizing.DERIVED  # if `bucket_numel` is 0
    gather_numel: int = attrs.field(default=0, validator=ge(0))  # of one message of updated weights; 0: a bucket
    reduce_dtype: torch.dtype | None = None  # on the wire; None: the dtype of the parameters themselves
    narrow_dtype: torch.dtype | None = None  # on the wire, for parameters of modules of `narrow_classes`
    narrow_classes: tuple[str, ...] = ()  # names, with or without the path: "Linear", "torch.nn.Linear"
    accumulate_dtype: torch.dtype | None = torch.float32  # gradient accumulators; None: each parameter's own
    master_dtype: torch.dtype | None = torch.float32  # of the masters; None: the parameters themselves
    averaging: Averaging = MEAN
    reduce_at: ReduceAt = ReduceAt.MICRO_STEP
    overlap: bool = True  # reduce buckets while backward runs; False: all at its end
    sparse_gradients: SparseGradients = SparseGradients.ROWS
    shard_group_size: int = attrs.field(default=0, validator=ge(0))  # ranks that hold one copy; 0: all ranks
    gradient_bits: int = attrs.field(default=0, validator=in_((0, 4, 8)))  # on the wire; 0: as `reduce_dtype` says
    gradient_hop_size: int = attrs.field(default=0, validator=ge(0))  # ranks of the first hop; then between hops
    gradient_error_beta: float = attrs.field(default=1.0, validator=and_(ge(0), le(1)))  # of error feedback; 1: off
    gradient_error_reset: int = attrs.field(default=1024, validator=ge(1))  # reductions until errors are cleared
    ignore_unused: bool = True  # False: a parameter without gradient on every rank is an error
    unit_numel: int = attrs.field(default=0, validator=ge(0))  # of modules gathered together; 0: derived
    persist_numel: int = attrs.field(default=100_000, validator=ge(0))  # smaller parameters are not sharded
    persist_total_numel: int = attrs.field(default=sys.maxsize, validator=ge(0))  # of all those together
    prefetch_numel: int = attrs.field(default=50_000_000, validator=ge(0))  # prefetched
    max_live_numel: int | None = attrs.field(default=None, validator=optional(ge(0)))  # whole; None: see residence.py
    max_reuse_numel: int = attrs.field(default=1_000_000_000, validator=ge(0))  # between two uses, else resharded
    weight_bits: int = attrs.field(default=0, validator=in_((0, 4, 8)))  # of gathered weights; 0: their dtype
    frozen_weight_bits: int = attrs.field(default=0, validator=in_((0, 4, 8)))  # of gathered frozen weights
    secondary_group_size: int = attrs.field(default=0, validator=ge(0))  # ranks that keep a secondary copy (hpZ)
    offload: Offload = NOTHING
    leaves: tuple[str, ...] = ()  # modules gathered as one unit: classes, paths ("": the root), or "*suffix"

    @property
    def keeps_whole(self) -> bool:
        """True if every rank keeps all gradients and all optimizer states."""
        return self.stage == 0

    @property
    def shards_weights(self) -> bool:
        """True if weights are sharded between uses (stage 3)."""
        return self.stage == 3

    def weight_bits_of(self, *, is_trained: bool) -> int:
        """Return the bits in which weights are gathered; 0: in their own dtype."""
        return self.weight_bits if is_trained else self.weight_bits or self.frozen_weight_bits

    def keeps_secondary(self, num_shards: int) -> bool:
        """Return whether a smaller group keeps weights that were gathered over `num_shards` ranks."""
        return 1 < self.secondary_group_size < num_shards

    def accumulate_for(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of gradient accumulators for parameters of `dtype`: never narrower than it."""
        return torch.promote_types(dtype, self.accumulate_dtype or dtype)

    def wire_for(self, bucket: Bucket) -> torch.dtype:
        """Return the dtype of the gradients of `bucket` on the wire."""
        return bucket.wire or self.reduce_dtype or bucket.dtype

    def of(self, bucket: Bucket) -> ZeroPolicy:
        """Return the policy of `bucket`: experts have no hpZ or hops, which need neighbours with equal weights."""
        if bucket.num_expert_shards == 1:
            return self
        return attrs.evolve(self, secondary_group_size=0, gradient_hop_size=0)

    def master_for(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the masters of parameters of `dtype`: never narrower than it."""
        return torch.promote_types(dtype, self.master_dtype or dtype)

    def __attrs_post_init__(self) -> None:
        if self.stage >= 2 and self.reduce_at is ReduceAt.BOUNDARY:
            raise ValueError(
                f"ZeroPolicy(stage={self.stage}, reduce_at=BOUNDARY) would keep a full local gradient, which stage "
                f"{self.stage} exists to avoid. Use stage=1 for one reduction per step, or reduce_at=MICRO_STEP."
            )
        if self.master_dtype == torch.float16 and self.accumulate_dtype != torch.float16:
            raise ValueError(
                f"ZeroPolicy(master_dtype=torch.float16, accumulate_dtype={self.accumulate_dtype}): the optimizer "
                "gets gradients in the dtype of the masters, and a finite sum may overflow in float16. Use "
                "accumulate_dtype=torch.float16 too, or wider masters."
            )
        if self.shard_group_size and not self.stage:
            raise ValueError(
                f"ZeroPolicy(stage=0, shard_group_size={self.shard_group_size}): stage 0 shards nothing. "
                "Use stage 1, 2 or 3, or leave shard_group_size out."
            )
        if self.gradient_bits and not self.stage:
            raise ValueError(
                f"ZeroPolicy(stage=0, gradient_bits={self.gradient_bits}): at stage 0 every rank keeps all "
                "gradients, and quantized sums would differ between ranks. Use stage 1, 2 or 3, or leave "
                "gradient_bits out."
            )
        if self.gradient_error_beta < 1 and not self.gradient_bits:
            raise ValueError(
                f"ZeroPolicy(gradient_error_beta={self.gradient_error_beta}) feeds back errors of quantized "
                "gradients, and gradient_bits is 0. Set gradient_bits to 4 or 8, or leave gradient_error_beta out."
            )
        if self.averaging.operation == "sum" and (self.averaging.prescale or self.averaging.predivide != 1.0):
            raise ValueError("Averaging(operation='sum') does not divide; leave prescale and predivide out")
