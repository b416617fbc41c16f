"""`deepspeed.init_inference` and its engine."""

from __future__ import annotations

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
