"""Loading of models for inference, quantized while their files are read.

    loaded = load_model("llama-3-8b", format="int4")        # a Hugging Face folder, a GGUF file, a checkpoint, ...
    loaded.module, loaded.decoder, loaded.report

Modules, low first: stored (tensors in files, plain or quantized), checkpoint_lists (DeepSpeed's JSON), prequantized
(GPTQ, AWQ, compressed-tensors), gguf, sources (what lies at a path), weights (memory for a model on the meta device,
and plain values out of files), streaming (a module filled and quantized layer by layer), packed (quantized models
written once, read without quantizing), load (the verb).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zengine.imports import homes_below, lazy_attributes

if TYPE_CHECKING:
    from zengine.inference.loading.load import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]

__getattr__, __dir__ = lazy_attributes(
    __name__, homes_below(__name__, {"load": "LoadedModel load_model"}), with_submodules=True
)
