"""`deepspeed.runtime.engine`."""

from __future__ import annotations

from zengine.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
