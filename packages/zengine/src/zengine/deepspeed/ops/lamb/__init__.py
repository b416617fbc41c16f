"""`deepspeed.ops.lamb`."""

from __future__ import annotations

from zengine.deepspeed.ops.lamb.fused_lamb import FusedLamb

__all__ = ["FusedLamb"]
