"""Dtypes that the keys of a config name, as text: without torch, for rules that are checked on any machine."""

from __future__ import annotations

import attrs

from zengine.config.keys.precision import Autocast
from zengine.config.keys.root import Settings

__all__ = ["autocast_of", "keeps_model_dtype", "param_dtypes"]


def keeps_model_dtype(settings: Settings) -> bool:
    """Return True if no key sets the dtype of the weights."""
    return not (settings.fp16.enabled or settings.bf16.enabled or settings.data_types.param_dtype)


def param_dtypes(settings: Settings) -> frozenset[str]:
    """Return the dtype of the weights by the config, float32 if no key sets it; two dtypes if bf16 is "auto"."""
    if settings.fp16.enabled:
        return frozenset({"float16"})
    if settings.bf16.enabled == "auto":
        return frozenset({"bfloat16", "float32"})
    return frozenset({"bfloat16" if settings.bf16.enabled else settings.data_types.param_dtype or "float32"})


def autocast_of(settings: Settings) -> Autocast:
    """Return the torch_autocast section with its dtype, or the one that the amp section is read as."""
    amp = settings.amp
    if not amp.enabled or amp.opt_level == "O0":
        dtype = "float16" if param_dtypes(settings) == {"float16"} else "bfloat16"
        return attrs.evolve(settings.torch_autocast, dtype=settings.torch_autocast.dtype or dtype)
    factor = 0.0 if amp.loss_scale == "dynamic" else float(amp.loss_scale)
    return Autocast(enabled=True, dtype="float16", loss_scale=factor)
