"""Memory of an optimizer with compressed communication (1-bit Adam and its relatives), before it trains.

Such an optimizer has `connect` and `needs_local_gradients` (bucket_exchange.py).  It holds errors for every
compressed bucket and, between steps, the last message.  In its compressed stage gradients are not reduced, so each
bucket keeps its own whole gradient until the step, also at stage 1; and a step makes the whole momenta.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zpartition.bucket_exchange import ERRORS, LATEST, sign_layout
from zpartition.gradients.reduce import reduce_at
from zpartition.gradients.reducer import buffer_bytes, shared_numels
from zpartition.layout.layout import Layout
from zpartition.layout.policy import ReduceAt, ZeroPolicy

__all__ = ["compression_bytes", "gradient_buffer_bytes", "is_compressed"]

IN_A_STEP = "momenta in a step"


def is_compressed(optimizer: Any) -> bool:
    """Return whether an optimizer takes each rank's own gradients, and communicates itself."""
    return hasattr(optimizer, "needs_local_gradients") and hasattr(optimizer, "connect")


def compression_bytes(layout: Layout, optimizer: Any) -> Mapping[str, int]:
    """Return the bytes on a rank by owner: errors and the last message, exact; whole momenta in a step, maximum."""
    if not is_compressed(optimizer) or layout.world_size == 1:
        return {}
    groups = optimizer.param_groups
    buckets = [bucket for bucket in layout.buckets if not groups[bucket.group].get("non_freeze")]
    signs = sign_layout(buckets, layout.world_size, fused=bool(getattr(optimizer, "fuses_message", False)))
    whole = sum(bucket.numel for bucket in layout.buckets) * torch.float32.itemsize
    return {
        ERRORS: signs.error_bytes,
        LATEST: signs.latest_bytes,
        IN_A_STEP: whole + 2 * signs.latest_bytes,  # with the messages that are sent and received
    }


def gradient_buffer_bytes(layout: Layout, policy: ZeroPolicy, num_backwards: int, optimizer: Any) -> int:
    """Return the maximum bytes of gradient buffers: of reduced gradients, or of each rank's own ones."""
    reduced = buffer_bytes(layout, policy, num_backwards)
    if not is_compressed(optimizer) or layout.world_size == 1 or reduce_at(policy, layout) is ReduceAt.BOUNDARY:
        return reduced
    shared, whole, wider = shared_numels(layout), 0, 0
    for bucket in layout.buckets:
        kept = policy.accumulate_for(bucket.dtype)
        if kept != bucket.dtype:
            wider += bucket.numel * kept.itemsize
        elif layout.num_shards > 1:  # else the bucket's buffer is kept anyway
            whole += max(bucket.numel, shared[bucket.dtype]) * kept.itemsize
    return max(reduced, whole + (reduced if num_backwards > 1 else 0)) + wider
