"""`deepspeed.runtime.hybrid_engine`."""

from __future__ import annotations

from zengine.hybrid_engine import DeepSpeedHybridEngine

__all__ = ["DeepSpeedHybridEngine"]
