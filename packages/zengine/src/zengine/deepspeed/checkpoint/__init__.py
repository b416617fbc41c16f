"""`deepspeed.checkpoint`."""

from __future__ import annotations

from zengine.deepspeed.checkpoint import utils

__all__ = ["utils"]
