"""Sequence parallelism: a sample's tokens are shared out over ranks that hold the same weights."""

from __future__ import annotations

from zpartition.sequence.ring import ring_attention
from zpartition.sequence.splits import Order, Split
from zpartition.sequence.ulysses import DistributedAttention

__all__ = ["DistributedAttention", "Order", "Split", "ring_attention"]
