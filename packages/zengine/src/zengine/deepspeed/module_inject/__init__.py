"""`deepspeed.module_inject`: split layers, and the replacement of a model's layers by them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zengine.imports import homes_below, lazy_attributes

if TYPE_CHECKING:
    from zengine.deepspeed.module_inject import auto_tp, layers, replace_module, tp_shard
    from zengine.deepspeed.module_inject.auto_tp import AutoTP, ReplaceWithTensorSlicing
    from zengine.deepspeed.module_inject.layers import EmbeddingLayer, LinearAllreduce, LinearLayer, Normalize
    from zengine.deepspeed.module_inject.modes import set_autotp_mode
    from zengine.deepspeed.module_inject.replace_module import (
        GroupQuantizer,
        generic_injection,
        replace_transformer_layer,
        revert_transformer_layer,
    )

__all__ = [
    "AutoTP",
    "EmbeddingLayer",
    "GroupQuantizer",
    "LinearAllreduce",
    "LinearLayer",
    "Normalize",
    "ReplaceWithTensorSlicing",
    "auto_tp",
    "generic_injection",
    "layers",
    "replace_module",
    "replace_transformer_layer",
    "revert_transformer_layer",
    "set_autotp_mode",
    "tp_shard",
]

_HOME_OF = homes_below(
    __name__,
    {
        "auto_tp": "AutoTP ReplaceWithTensorSlicing",
        "layers": "EmbeddingLayer LinearAllreduce LinearLayer Normalize",
        "modes": "set_autotp_mode",
        "replace_module": "GroupQuantizer generic_injection replace_transformer_layer revert_transformer_layer",
    },
)  # imported on first use

__getattr__, __dir__ = lazy_attributes(__name__, _HOME_OF, with_submodules=True)
