"""DeepSpeed-compatible training engine over five small packages.

    engine, optimizer, loader, scheduler = zengine.initialize(model=model, config="config.json", training_data=data)
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        report = engine.step()

The config is DeepSpeed's JSON.  Each package documents its part: `zcomm` communication, `zprecision` precision,
`zpartition` partitioning, `zoptim` optimizers, `zckpt` checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zengine.imports import lazy_attributes
from zengine.initialize import add_config_arguments, initialize

if TYPE_CHECKING:
    from zengine.captured_step import CapturedStep, capture_step
    from zengine.compression.clean import redundancy_clean
    from zengine.compression.start import init_compression
    from zengine.config import ConfigError
    from zengine.deepspeed_engine import DeepSpeedEngine
    from zengine.engine.clock import CallOrderError, HalfLoaded, MicroStep
    from zengine.engine.drift import RanksDisagree
    from zengine.engine.engine import Engine
    from zengine.engine.feature import Feature
    from zengine.engine.memory_errors import OutOfMemory
    from zengine.engine.nonfinite import LossScaleExhausted
    from zengine.features.signals import StoppedBySignal
    from zengine.pipeline_engine import PipelineEngine
    from zengine.step_report import NonFiniteGradient, StepReport

__version__ = "0.3.0"

__all__ = [
    "CallOrderError",
    "CapturedStep",
    "ConfigError",
    "DeepSpeedEngine",
    "Engine",
    "Feature",
    "HalfLoaded",
    "LossScaleExhausted",
    "MicroStep",
    "NonFiniteGradient",
    "OutOfMemory",
    "PipelineEngine",
    "RanksDisagree",
    "StepReport",
    "StoppedBySignal",
    "add_config_arguments",
    "capture_step",
    "init_compression",
    "initialize",
    "redundancy_clean",
]

# Imported on first use, at the latest by `initialize`, so that `zengine --help` imports no torch.
_HOME_OF = {
    "CallOrderError": "zengine.engine.clock",
    "CapturedStep": "zengine.captured_step",
    "ConfigError": "zengine.config",
    "DeepSpeedEngine": "zengine.deepspeed_engine",
    "Engine": "zengine.engine.engine",
    "Feature": "zengine.engine.feature",
    "HalfLoaded": "zengine.engine.clock",
    "LossScaleExhausted": "zengine.engine.nonfinite",
    "MicroStep": "zengine.engine.clock",
    "NonFiniteGradient": "zengine.step_report",
    "OutOfMemory": "zengine.engine.memory_errors",
    "PipelineEngine": "zengine.pipeline_engine",
    "RanksDisagree": "zengine.engine.drift",
    "StepReport": "zengine.step_report",
    "StoppedBySignal": "zengine.features.signals",
    "capture_step": "zengine.captured_step",
    "init_compression": "zengine.compression.start",
    "redundancy_clean": "zengine.compression.clean",
}

RENAMED = {"Culprit": "zengine.NonFiniteGradient"}

__getattr__, __dir__ = lazy_attributes(__name__, _HOME_OF, RENAMED)
