"""`deepspeed.moe`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zengine.imports import lazy_attributes

if TYPE_CHECKING:
    from zengine.deepspeed.moe import experts, layer, mappings, sharded_moe, utils

__all__ = ["experts", "layer", "mappings", "sharded_moe", "utils"]

__getattr__, __dir__ = lazy_attributes(__name__, {}, with_submodules=True)  # imported on first use
