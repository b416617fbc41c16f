"""`deepspeed.moe`."""

from __future__ import annotations

from zengine.deepspeed.moe import experts, layer, mappings, sharded_moe, utils

__all__ = ["experts", "layer", "mappings", "sharded_moe", "utils"]
