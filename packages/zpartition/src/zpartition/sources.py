"""Where a unit's weights are gathered from, when modules need them (ZeRO++: Wang et al. 2023, arXiv 2306.10209).

The truth is the span that each rank owns, and `Shards` sends it as it is.  Two things can stand in front of it, each
for one *version* of the weights, which ends when they are updated, edited or loaded.

- `Codes` (qwZ) sends 8 or 4 bits an element: a rank encodes its span at the first gather of a version, and every
  rank, the owner too, sees the decoded values, within `BlockCode.relative_error` of their block's largest magnitude.
- `Secondary` (hpZ) keeps what the first gather of a version brought: each rank the part that it would own if a small
  group of neighbours held a copy by themselves.  Later gathers of the version go over that group alone, over fast
  links.  It costs unit / group size elements for as long as the partition lives.

All ranks gather in one order (residence.py), so they agree on which gather of a version is the first.  People never
read from here: state dicts, `gathered` and checkpoints take the truth.

Rejected: a secondary part in codes (decoding again at every gather is what the small group is to save); encoding the
masters instead of the weights (an edit would show before it is published).
"""

from __future__ import annotations

from typing import Protocol, final

import attrs
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import zcomm
from zpartition.buffers import BufferPool, flat_zeros
from zpartition.layout import Bucket
from zpartition.policy import ZeroPolicy

__all__ = ["SHARDS", "Source", "kept_bytes", "source_for"]

WEIGHT_BLOCK = 256  # elements that share a scale


class Source(Protocol):
    """What the gathers of one bucket read.

    own: (span numel,) this rank's truth; whole: (bucket numel,) to be filled, in the same dtype.
    """

    def gather(
        self, whole: Tensor, own: Tensor, group: ProcessGroup | None, pool: BufferPool, label: str
    ) -> zcomm.Handle:
        """Start to fill `whole` over `group`, which holds one copy; `pool` has room for what travels."""

    def stale(self) -> None:
        """The weights have changed."""

    @property
    def kept_bytes(self) -> int:
        """What it keeps beside the truth."""


@final
@attrs.frozen
class Shards:
    """The truth itself."""

    kept_bytes: int = 0

    def gather(
        self, whole: Tensor, own: Tensor, group: ProcessGroup | None, pool: BufferPool, label: str
    ) -> zcomm.Handle:
        return zcomm.all_gather(whole, own, group, async_op=True, label=label)

    def stale(self) -> None:
        pass


SHARDS: Source = Shards()


@final
@attrs.define(eq=False)
class Codes:
    """Blocks of few bits in place of the truth."""

    code: zcomm.BlockCode
    message: Tensor  # (bytes,) uint8: this rank's span in codes
    is_current: bool = False  # whether `message` says what the truth is

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
        return zcomm.after(handle, lambda: pool.give_back(buffer))

    def stale(self) -> None:
        self.is_current = False

    @property
    def kept_bytes(self) -> int:
        return self.message.nbytes


@final
@attrs.define(eq=False)
class Secondary:
    """A second, coarser cut: over a few neighbours."""

    primary: Source
    group: ProcessGroup | None  # of the neighbours
    part: Tensor  # (bucket numel / size of `group`,): what this rank would own there
    is_current: bool = False  # whether `part` is of the weights as they are

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

    def stale(self) -> None:
        self.is_current = False
        self.primary.stale()

    @property
    def kept_bytes(self) -> int:
        return self.part.nbytes + self.primary.kept_bytes


def source_for(
    bucket: Bucket, policy: ZeroPolicy, group: ProcessGroup | None, device: torch.device, *, is_trained: bool
) -> Source:
    """What `policy` asks for; `group` holds one copy.  A collective where anything is kept."""
    source = SHARDS
    bits = policy.weight_bits_of(is_trained=is_trained)
    if bits:
        code = zcomm.BlockCode(bits=bits, block=WEIGHT_BLOCK)
        source = Codes(code, flat_zeros(code.num_bytes(bucket.span_numel), torch.uint8, device, group))
    if policy.keeps_secondary(bucket.num_shards):
        near = zcomm.run(policy.secondary_group_size, group)
        part = flat_zeros(bucket.numel // policy.secondary_group_size, bucket.dtype, device, near)
        source = Secondary(source, near, part)
    return source


def kept_bytes(bucket: Bucket, policy: ZeroPolicy, *, is_trained: bool) -> int:
    """`Source.kept_bytes` of what `source_for` would make."""
    if bucket.unit is None:
        return 0
    bits, secondary = policy.weight_bits_of(is_trained=is_trained), policy.keeps_secondary(bucket.num_shards)
    codes = zcomm.BlockCode(bits=bits, block=WEIGHT_BLOCK).num_bytes(bucket.span_numel) if bits else 0
    part = bucket.numel // policy.secondary_group_size * bucket.dtype.itemsize if secondary else 0
    return codes + part
