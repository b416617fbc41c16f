"""Inference: a decoder, recognized by what it computes, over a static cache.

    loaded = load_model("llama-3-8b", format="int4")            # or from files, quantized while they are read
    decoder = recognize(model)                                  # over the module's own weights
    steps = DecoderPass(decoder, KVCache.create(decoder, num_slots=4, capacity=1024))
    samples = generate(steps, [Request(prompt=(1, 2, 3), sampling=Sampling(temperature=0.7), seeds=(0, 1))])

Modules, low first: observe (calls of a pass), attend (attention), structure (values that describe a decoder),
matching and recognize (which form computes the observed numbers), cache, fused (the parts that run in C), decoder
(the pass), verify, sampling, generation (samples over slots).  Beside them: quantized, quantized_modules, quality,
offload (blocks that rest on the host or on a drive), loading (files).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zengine.imports import homes_below, lazy_attributes

if TYPE_CHECKING:
    from zengine.inference.loading.load import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]

__getattr__, __dir__ = lazy_attributes(
    __name__, homes_below(__name__, {"loading.load": "LoadedModel load_model"}), with_submodules=True
)
