"""Reduction of a bucket's gradients over ranks.

The reducer decides when a bucket is sent; this module decides over which groups, and in which format.  Reductions
start at once and are finished in the order of their start, which is equal on all ranks, so their later phases may be
collectives, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol, final

import attrs
from torch import Tensor
from torch.distributed import ProcessGroup

import zcomm
from zpartition.layout.layout import Bucket, Layout
from zpartition.layout.policy import ReduceAt, ZeroPolicy
from zpartition.layout.ranks import Ranks

__all__ = ["Factors", "GradientReduction", "factors", "reduce_at", "reduction_for"]

GRADIENT_BLOCK = 128  # elements that share a scale: gradients of neighbours differ more than weights do


class GradientReduction(Protocol):
    """Sums flat buckets over ranks."""

    @property
    def errors(self) -> Mapping[str, zcomm.ErrorFeedback]:
        """Errors of quantized messages, by the label of their bucket."""

    def reduce(self, sent: Tensor, span: tuple[int, int], label: str) -> tuple[zcomm.Handle, Tensor]:
        """Start to sum `sent`, (bucket numel,), which may be overwritten.

        label: of the bucket, the same in each step.

        Returns a handle and the tensor that is valid after its `wait`: the whole sum, or its elements `span`.
        """


_NO_ERRORS: Mapping[str, zcomm.ErrorFeedback] = MappingProxyType({})


@final
@attrs.frozen(eq=False)
class AllReduce:
    """Every rank gets the whole sum."""

    group: ProcessGroup | None
    errors = _NO_ERRORS

    def reduce(self, sent: Tensor, span: tuple[int, int], label: str) -> tuple[zcomm.Handle, Tensor]:
        return zcomm.all_reduce(sent, self.group, async_op=True, label=label), sent


@final
@attrs.frozen(eq=False)
class ReduceScatter:
    """Every rank gets its span, in place."""

    group: ProcessGroup | None
    errors = _NO_ERRORS

    def reduce(self, sent: Tensor, span: tuple[int, int], label: str) -> tuple[zcomm.Handle, Tensor]:
        received = sent[slice(*span)]
        return zcomm.reduce_scatter(received, sent, self.group, async_op=True, label=label), received


@final
@attrs.frozen(eq=False)
class QuantizedReduceScatter:
    """Every rank gets its span, from addends quantized to few bits (qgZ: Wang et al. 2023, section 3.3).

    A block with a non-finite value stays non-finite, so that overflow is detected.
    """

    group: ProcessGroup | None
    hops: tuple[ProcessGroup | None, ProcessGroup | None] | None  # inside runs of neighbours, and between them
    code: zcomm.BlockCode
    beta: float = 1.0  # of error feedback; 1: none
    reset_every: int = 1024  # reductions
    errors: dict[str, zcomm.ErrorFeedback] = attrs.field(factory=dict)

    def reduce(self, sent: Tensor, span: tuple[int, int], label: str) -> tuple[zcomm.Handle, Tensor]:
        received = sent[slice(*span)]
        if self.beta < 1 and label not in self.errors:
            self.errors[label] = zcomm.ErrorFeedback(beta=self.beta, reset_every=self.reset_every)
        handle = zcomm.reduce_scatter_quantized(
            received,
            sent,
            self.group,
            groups=self.hops,
            code=self.code,
            feedback=self.errors.get(label),
            async_op=True,
            label=label,
        )
        return handle, received


@final
@attrs.frozen(eq=False)
class HybridReduce:
    """Reduce-scatter over the shard group, then all-reduce over its replicas: 1 / shards of the bytes."""

    within: ReduceScatter | QuantizedReduceScatter
    replicas: ProcessGroup | None

    @property
    def errors(self) -> Mapping[str, zcomm.ErrorFeedback]:
        return self.within.errors

    def reduce(self, sent: Tensor, span: tuple[int, int], label: str) -> tuple[zcomm.Handle, Tensor]:
        handle, received = self.within.reduce(sent, span, label)

        def sum_replicas() -> zcomm.Handle:
            return zcomm.all_reduce(received, self.replicas, async_op=True, label=f"{label} of replicas")

        return zcomm.after(handle, sum_replicas), received


def reduction_for(ranks: Ranks, num_shards: int, policy: ZeroPolicy) -> GradientReduction:
    """Return the reduction of a layout of `num_shards`; 1 if every rank keeps all gradients.  A collective."""
    if num_shards == 1:
        return AllReduce(ranks.world)
    within = _quantized(ranks, policy) if policy.gradient_bits else ReduceScatter(ranks.shard)
    return within if ranks.num_replicas == 1 else HybridReduce(within, ranks.replicas)


def _quantized(ranks: Ranks, policy: ZeroPolicy) -> QuantizedReduceScatter:
    """Return the quantized reduction: one hop, or two if the policy has a smaller run of neighbours."""
    code = zcomm.BlockCode(bits=policy.gradient_bits, block=GRADIENT_BLOCK)
    size = policy.gradient_hop_size
    feedback = policy.gradient_error_beta, policy.gradient_error_reset
    if not 1 < size < ranks.num_shards:
        return QuantizedReduceScatter(ranks.shard, None, code, *feedback)
    hops = (zcomm.consecutive_group(size, ranks.shard), zcomm.strided_group(size, ranks.shard))
    for group in hops:  # the first collective of a group waits for all its ranks; do it before orders may differ
        zcomm.barrier(group, label="hops")
    return QuantizedReduceScatter(ranks.shard, hops, code, *feedback)


@attrs.frozen
class Factors:
    """Position of the division by the number of ranks; the product is 1 / ranks, or 1 for a sum."""

    on_arrival: float  # while a gradient is copied into its bucket, at no cost
    before: float  # in the bucket, before it is sent
    after: float  # in the received tensor


def factors(policy: ZeroPolicy, layout: Layout, bucket: Bucket) -> Factors:
    """Return the factors of a bucket.  In full precision all division is on arrival: no overflow, and one pass less.

    Buffers that accumulate over micro-steps hold plain sums, which `param.grad` shows.
    """
    before, after = policy.averaging.factors(layout.world_size)
    is_wide = bucket.dtype.itemsize >= 4 and policy.wire_for(bucket).itemsize >= 4
    if is_wide and reduce_at(policy, layout) is ReduceAt.MICRO_STEP:
        return Factors(before * after, 1.0, 1.0)
    return Factors(1.0, before, after)


def reduce_at(policy: ZeroPolicy, layout: Layout) -> ReduceAt:
    """Return MICRO_STEP or BOUNDARY; one rank reduces at the boundary, unless its gradients are offloaded."""
    is_alone = layout.world_size == 1 and not policy.offload.moves_states
    return ReduceAt.BOUNDARY if is_alone or policy.reduce_at is ReduceAt.BATCH else policy.reduce_at
