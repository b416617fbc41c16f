"""`deepspeed.runtime.engine`."""

from __future__ import annotations

from zengine.deepspeed_engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
