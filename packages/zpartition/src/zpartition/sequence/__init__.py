"""Sequence parallelism: a sample's tokens are shared out over ranks that hold the same weights."""

from __future__ import annotations

from zpartition.sequence.ulysses import DistributedAttention

__all__ = ["DistributedAttention"]
