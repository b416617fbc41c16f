"""What a partition should do, as frozen values.

Two questions define every stage up to 2: *what is kept* (whole gradients, or this rank's shard) and
*when gradients are reduced*.  Stage 0 keeps everything, stage 1 shards the optimizer, stage 2 the
gradients too.  Stages are therefore not classes: one reducer reads this policy.  Stage 3 is stage 2 whose weights
rest as shards and are gathered while a module needs them.

When to reduce
--------------
`ReduceAt.MICRO_STEP` reduces after each backward and adds the reduced value to the accumulator:
sum over micro-steps of (sum over ranks).  `ReduceAt.BOUNDARY` accumulates locally and reduces once:
sum over ranks of (sum over micro-steps).  The two differ in the last bits, and no reordering of
messages can hide it.  The first is the default for every stage, because then stages 0, 1 and 2 give the
same bits and switching the stage of a run never changes its losses; the second saves traffic with
accumulation at stages 0 and 1 and costs a full local gradient.  It is refused at stage 2, whose whole
point is not to keep that gradient.  `ReduceAt.BATCH` is the second for pipelines, which run several micro-batches at
a time: a rank has whole gradients of its layers while it does, at every stage.
"""

from __future__ import annotations

import enum
import sys

import attrs
import torch
from attrs.validators import ge, gt, in_, instance_of

from zpartition.layout import Bucket
from zpartition.offload import NOTHING, Offload


class ReduceAt(enum.Enum):
    """When local gradients are exchanged."""

    MICRO_STEP = "micro_step"  # after every backward: GAS x traffic, no full local gradient between steps
    BOUNDARY = "boundary"  # after the last backward of a step: 1 x traffic, one full local gradient
    BATCH = "batch"  # the same at any stage, for pipelines


class SparseGradients(enum.Enum):
    """What becomes of the gradients of embeddings that were made with sparse=True."""

    ROWS = "rows"  # exchanged as (indices, values), with a wait for the lengths
    DENSE = "dense"  # written into a bucket, as every other gradient is


@attrs.frozen(kw_only=True)
class Averaging:
    """How the sum over ranks becomes a mean, and on which side of the wire the division happens.

    Dividing after the sum keeps small values exact in half precision, dividing before keeps large sums
    from overflowing; `predivide` splits the division between the two.
    """

    operation: str = attrs.field(default="mean", validator=in_(("mean", "sum")))
    prescale: bool = attrs.field(default=False, validator=instance_of(bool))  # divide by the world before
    predivide: float = attrs.field(default=1.0, validator=gt(0))  # part of the division done before the sum

    def factors(self, world_size: int) -> tuple[float, float]:
        """The multipliers (before, after) the sum over `world_size` ranks."""
        if self.operation == "sum" or world_size == 1:
            return 1.0, 1.0
        if self.prescale:
            return 1.0 / world_size, 1.0
        return 1.0 / self.predivide, self.predivide / world_size


MEAN = Averaging()


@attrs.frozen(kw_only=True)
class ZeroPolicy:
    """What lives where (Rajbhandari et al. 2020, sections 5.1-5.2).

    With P parameters, W ranks and fp32 accumulators, a rank holds after a step:
    stage 0: P weights, P gradients, P states; stage 1 and 2: P weights, P/W gradients, P/W states; stage 3: P/W of
    each, and what is gathered.  The fields from `unit_numel` on are stage 3's.  With shard groups smaller than the
    world, W is their size there.
    """

    stage: int = attrs.field(default=0, validator=in_((0, 1, 2, 3)))
    bucket_numel: int = attrs.field(default=0, validator=ge(0))  # 0: derived from the model's size
    reduce_dtype: torch.dtype | None = None  # on the wire; None: the dtype of the parameters themselves
    narrow_dtype: torch.dtype | None = None  # on the wire, of parameters that modules of `narrow_classes` hold
    narrow_classes: tuple[str, ...] = ()  # names, with or without the path: "Linear", "torch.nn.Linear"
    accumulate_dtype: torch.dtype | None = torch.float32  # gradient accumulators; None: each parameter's own
    master_dtype: torch.dtype | None = torch.float32  # what the optimizer updates; None: the parameters themselves
    averaging: Averaging = MEAN
    reduce_at: ReduceAt = ReduceAt.MICRO_STEP
    overlap: bool = True  # launch a bucket while backward still runs; False: all at its end
    sparse_gradients: SparseGradients = SparseGradients.ROWS
    shard_group_size: int = attrs.field(default=0, validator=ge(0))  # ranks that hold one copy; 0: all
    gradient_bits: int = attrs.field(default=0, validator=in_((0, 4, 8)))  # on the wire; 0: as `reduce_dtype` says
    gradient_hop_size: int = attrs.field(default=0, validator=ge(0))  # ranks that sum first, then between such runs
    ignore_unused: bool = True  # False: a parameter without gradient on every rank is an error
    unit_numel: int = attrs.field(default=0, validator=ge(0))  # of modules gathered as one; 0: from the model's size
    persist_numel: int = attrs.field(default=100_000, validator=ge(0))  # smaller parameters stay whole
    persist_total_numel: int = attrs.field(default=sys.maxsize, validator=ge(0))  # of all those together
    prefetch_numel: int = attrs.field(default=50_000_000, validator=ge(0))  # gathered ahead of their use
    max_live_numel: int = attrs.field(default=1_000_000_000, validator=ge(0))  # kept whole after the forward pass
    max_reuse_numel: int = attrs.field(default=1_000_000_000, validator=ge(0))  # used in between, else not kept
    weight_bits: int = attrs.field(default=0, validator=in_((0, 4, 8)))  # of gathered weights; 0: as they are
    frozen_weight_bits: int = attrs.field(default=0, validator=in_((0, 4, 8)))  # the same, of those not trained
    secondary_group_size: int = attrs.field(default=0, validator=ge(0))  # ranks that keep a copy to gather again
    offload: Offload = NOTHING
    leaves: tuple[str, ...] = ()  # modules never cut into units: classes, paths ("": the root), or "*end" of paths

    @property
    def keeps_whole(self) -> bool:
        """Whether every rank keeps all gradients and all optimizer states."""
        return self.stage == 0

    @property
    def shards_weights(self) -> bool:
        """Whether weights rest as shards."""
        return self.stage == 3

    def weight_bits_of(self, *, is_trained: bool) -> int:
        """Bits in which weights are gathered; 0: as they are."""
        return self.weight_bits if is_trained else self.weight_bits or self.frozen_weight_bits

    def keeps_secondary(self, num_shards: int) -> bool:
        """Whether a smaller group keeps what was gathered over `num_shards` ranks."""
        return 1 < self.secondary_group_size < num_shards

    def accumulate_for(self, dtype: torch.dtype) -> torch.dtype:
        """Accumulator of gradients of parameters of `dtype`: never narrower than the parameters."""
        return torch.promote_types(dtype, self.accumulate_dtype or dtype)

    def wire_for(self, bucket: Bucket) -> torch.dtype:
        """What the gradients of `bucket` travel in."""
        return bucket.wire or self.reduce_dtype or bucket.dtype

    def of(self, bucket: Bucket) -> ZeroPolicy:
        """What holds for `bucket`: hpZ and hops want neighbours that hold the same, which those of experts do not."""
        return self if bucket.deal == 1 else attrs.evolve(self, secondary_group_size=0, gradient_hop_size=0)

    def master_for(self, dtype: torch.dtype) -> torch.dtype:
        """What the optimizer updates for parameters of `dtype`: never narrower than the parameters."""
        return torch.promote_types(dtype, self.master_dtype or dtype)

    def __attrs_post_init__(self) -> None:
        if self.stage >= 2 and self.reduce_at is ReduceAt.BOUNDARY:
            raise ValueError(
                f"ZeroPolicy(stage={self.stage}, reduce_at=BOUNDARY) would keep a full local gradient, which stage "
                f"{self.stage} exists to avoid: use stage=1 for one exchange per step, or reduce_at=MICRO_STEP"
            )
        if self.master_dtype == torch.float16 and self.accumulate_dtype != torch.float16:
            raise ValueError(
                f"ZeroPolicy(master_dtype=torch.float16, accumulate_dtype={self.accumulate_dtype}): an optimizer is "
                "given gradients in the dtype of its masters, and a sum that is finite here may not be in float16. "
                "Use accumulate_dtype=torch.float16 too, or wider masters."
            )
        if self.shard_group_size and not self.stage:
            raise ValueError(
                f"ZeroPolicy(stage=0, shard_group_size={self.shard_group_size}): stage 0 shards nothing. "
                "Use stage 1, 2 or 3, or leave shard_group_size out."
            )
        if self.gradient_bits and not self.stage:
            raise ValueError(
                f"ZeroPolicy(stage=0, gradient_bits={self.gradient_bits}): every rank keeps all gradients there, and "
                "sums of few bits would differ between ranks. Use stage 1, 2 or 3, or leave gradient_bits out."
            )
        if self.averaging.operation == "sum" and (self.averaging.prescale or self.averaging.predivide != 1.0):
            raise ValueError("Averaging(operation='sum') does not divide: drop prescale and predivide")
