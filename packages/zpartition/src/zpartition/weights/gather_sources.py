"""Sources of all-gathers (ZeRO++: Wang et al. 2023, arXiv 2306.10209).

The exact weights are the spans that ranks own, and `ExactShards` sends them unchanged.  Two sources can replace them,
each for one *version* of the weights, which ends when they are updated, edited or loaded.

- `QuantizedShards` (qwZ) sends 8 or 4 bits per element: a rank encodes its span at the first gather of a version.
  Every rank, the owner too, sees decoded values, within `BlockCode.relative_error` of their block's maximum.
- `SecondaryShards` (hpZ) keeps the result of the first gather of a version: each rank the part that it would own if a
  small group of neighbours held a copy.  Later gathers of the version use that group alone, over fast links.  It
  costs unit / group size elements for as long as the partition lives.

All ranks gather in one order (unshard.py), so they agree on the first gather of a version.  State dicts, `gathered`
and checkpoints always read exact weights.

Rejected: a quantized secondary shard (decoding at every gather is the cost that the small group saves); encoding the
masters instead of the weights (an edit would show before it is published).
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Protocol, final

import attrs
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import zcomm
from zpartition.layout.layout import Bucket
from zpartition.layout.policy import ZeroPolicy
from zpartition.layout.residence import residence
from zpartition.memory.buffers import BufferPool, flat_zeros

__all__ = ["SHARDS", "GatherSource", "kept_bytes", "most_gathered_bytes", "source_for"]

WEIGHT_BLOCK = 256  # elements that share a scale


class GatherSource(Protocol):
    """Input of the gathers of one bucket.

    own: (span numel,) this rank's exact shard; whole: (bucket numel,) to be filled, in the same dtype.
    """

    def gather(
        self, whole: Tensor, own: Tensor, group: ProcessGroup | None, pool: BufferPool, label: str
    ) -> zcomm.Handle:
        """Start to fill `whole` over `group`, which holds one copy; `pool` has room for the message."""

    def invalidate(self) -> None:
        """End a version: the weights have changed."""

    @property
    def kept_bytes(self) -> int:
        """Bytes kept beside the exact shard."""


@final
@attrs.frozen
class ExactShards:
    """The exact shards."""

    kept_bytes: int = 0

    def gather(
        self, whole: Tensor, own: Tensor, group: ProcessGroup | None, pool: BufferPool, label: str
    ) -> zcomm.Handle:
        return zcomm.all_gather(whole, own, group, async_op=True, label=label, agreed=True)

    def invalidate(self) -> None:
        pass


SHARDS: GatherSource = ExactShards()


@final
@attrs.define(eq=False)
class QuantizedShards:
    """Blocks of few bits instead of exact values."""

    code: zcomm.BlockCode
    message: Tensor  # (bytes,) uint8: this rank's span, quantized
    is_current: bool = False  # whether `message` encodes the current weights

    def gather(
        self, whole: Tensor, own: Tensor, group: ProcessGroup | None, pool: BufferPool, label: str
    ) -> zcomm.Handle:
        if not self.is_current:
            self.code.encode(own, self.message)
            self.is_current = True
        num_bytes = self.message.numel() * zcomm.group_size(group)
        buffer = pool.obtain(num_bytes, torch.uint8)
        handle = zcomm.all_gather_quantized(
            whole, self.message, group, code=self.code, received=buffer[:num_bytes], async_op=True, label=label
        )
        return zcomm.after(handle, lambda: pool.release(buffer))

    def invalidate(self) -> None:
        self.is_current = False

    @property
    def kept_bytes(self) -> int:
        return self.message.nbytes


@final
@attrs.define(eq=False)
class SecondaryShards:
    """A second, coarser sharding over a few neighbours."""

    primary: GatherSource
    group: ProcessGroup | None  # neighbours
    part: Tensor  # (bucket numel / size of `group`,): what this rank would own there
    is_current: bool = False  # whether `part` holds the current weights

    def gather(
        self, whole: Tensor, own: Tensor, group: ProcessGroup | None, pool: BufferPool, label: str
    ) -> zcomm.Handle:
        if self.is_current:
            return zcomm.all_gather(whole, self.part, self.group, async_op=True, label=f"{label}, secondary")
        start = zcomm.group_rank(self.group) * self.part.numel()

        def keep() -> None:
            self.part.copy_(whole[start : start + self.part.numel()])
            self.is_current = True

        return zcomm.after(self.primary.gather(whole, own, group, pool, label), keep)

    def invalidate(self) -> None:
        self.is_current = False
        self.primary.invalidate()

    @property
    def kept_bytes(self) -> int:
        return self.part.nbytes + self.primary.kept_bytes


def source_for(
    bucket: Bucket, policy: ZeroPolicy, group: ProcessGroup | None, device: torch.device, *, is_trained: bool
) -> GatherSource:
    """Return the source of `policy`; `group` holds one copy.  A collective if the source keeps anything."""
    source = SHARDS
    bits = _bits(bucket, policy, is_trained=is_trained)
    if bits:
        code = zcomm.BlockCode(bits=bits, block=WEIGHT_BLOCK)
        source = QuantizedShards(code, flat_zeros(code.num_bytes(bucket.span_numel), torch.uint8, device, group))
    if policy.keeps_secondary(bucket.num_shards):
        near = zcomm.consecutive_group(policy.secondary_group_size, group)
        part = flat_zeros(bucket.numel // policy.secondary_group_size, bucket.dtype, device, near)
        source = SecondaryShards(source, near, part)
    return source


def _bits(bucket: Bucket, policy: ZeroPolicy, *, is_trained: bool) -> int:
    """Return the bits in which a bucket is gathered; 0: in its own dtype, as codes are."""
    return policy.weight_bits_of(is_trained=is_trained) if bucket.dtype.is_floating_point else 0


def kept_bytes(bucket: Bucket, policy: ZeroPolicy, *, is_trained: bool) -> int:
    """Return `GatherSource.kept_bytes` of the source that `source_for` would create."""
    if bucket.unit is None:
        return 0
    bits, secondary = _bits(bucket, policy, is_trained=is_trained), policy.keeps_secondary(bucket.num_shards)
    codes = zcomm.BlockCode(bits=bits, block=WEIGHT_BLOCK).num_bytes(bucket.span_numel) if bits else 0
    part = bucket.numel // policy.secondary_group_size * bucket.dtype.itemsize if secondary else 0
    return codes + part


def most_gathered_bytes(units: Mapping[str, int], buckets: Sequence[Bucket], policy: ZeroPolicy) -> int:
    """Return the most bytes of whole units: the buffers of `buckets`, and the messages of few bits that fill them.

    units: elements by name, in the order of their modules.  As many elements as may be whole are filled with the
    units that have the most bytes an element, the last one in part: units of codes and others differ.
    """
    if not buckets:
        return 0
    left = most_numel = min(sum(units.values()), residence(units, policy, buckets[0].num_shards).most_numel)
    sizes: collections.Counter[str] = collections.Counter()
    for bucket in buckets:
        sizes[bucket.unit or ""] += bucket.numel * bucket.dtype.itemsize
    total = 0.0
    for name in sorted(units, key=lambda name: -sizes[name] / units[name]):
        part = min(left, units[name])
        total, left = total + sizes[name] * part / units[name], left - part
    bits = max(policy.weight_bits, policy.frozen_weight_bits)
    code = zcomm.BlockCode(bits=bits, block=WEIGHT_BLOCK) if bits else None
    coded = [bucket for bucket in buckets if bucket.dtype.is_floating_point]
    received = max((b.num_shards * code.num_bytes(b.span_numel) / b.numel for b in coded), default=0) if code else 0
    return math.ceil(total + most_numel * received)
