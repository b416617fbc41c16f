"""`deepspeed.moe`."""

from __future__ import annotations

from zengine.deepspeed.moe import layer, utils

__all__ = ["layer", "utils"]
