"""`deepspeed.moe.layer`."""

from __future__ import annotations

from zengine.deepspeed.later import absent

__all__ = ["MoE"]

MoE = absent("moe.layer.MoE")
