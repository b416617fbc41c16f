"""`deepspeed.init_inference` and its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zengine.imports import homes_below, lazy_attributes

if TYPE_CHECKING:
    from zengine.deepspeed.inference import config, engine
    from zengine.deepspeed.inference.config import DeepSpeedInferenceConfig, default_inference_config
    from zengine.deepspeed.inference.engine import InferenceEngine, init_inference

__all__ = [
    "DeepSpeedInferenceConfig",
    "InferenceEngine",
    "config",
    "default_inference_config",
    "engine",
    "init_inference",
]

_HOME_OF = homes_below(
    __name__,
    {
        "config": "DeepSpeedInferenceConfig default_inference_config",
        "engine": "InferenceEngine init_inference",
    },
)  # imported on first use

__getattr__, __dir__ = lazy_attributes(__name__, _HOME_OF, with_submodules=True)
