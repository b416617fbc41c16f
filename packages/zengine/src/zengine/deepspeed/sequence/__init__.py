"""`deepspeed.sequence`."""

from __future__ import annotations

from zengine.deepspeed.sequence import cross_entropy, fpdt_layer, layer, vocab_parallel_ops

__all__ = ["cross_entropy", "fpdt_layer", "layer", "vocab_parallel_ops"]
