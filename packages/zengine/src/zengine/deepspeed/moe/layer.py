"""`deepspeed.moe.layer`: the layer of experts itself is zpartition's."""

from __future__ import annotations

from zpartition.experts import MoE

__all__ = ["MoE"]
