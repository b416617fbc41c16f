"""`deepspeed.sequence`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zengine.imports import lazy_attributes

if TYPE_CHECKING:
    from zengine.deepspeed.sequence import cross_entropy, fpdt_layer, layer, vocab_parallel_ops

__all__ = ["cross_entropy", "fpdt_layer", "layer", "vocab_parallel_ops"]

__getattr__, __dir__ = lazy_attributes(__name__, {}, with_submodules=True)  # imported on first use
