"""A DeepSpeed-compatible training engine, thin over five small packages.

    engine, optimizer, loader, scheduler = zengine.initialize(model=model, config="config.json", training_data=data)
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        report = engine.step()

The config is DeepSpeed's JSON.  What each part does is documented in its own package: communication in `zcomm`,
precision in `zprecision`, partitioning in `zpartition`, optimizers in `zoptim`, checkpoints in `zckpt`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zengine.arguments import add_config_arguments
from zengine.clock import CallOrderError, HalfLoaded, MicroStep
from zengine.initialize import initialize
from zengine.lazily import importing
from zengine.report import Culprit, StepReport

if TYPE_CHECKING:
    from zengine.agreement import RanksDisagree
    from zengine.config import ConfigError
    from zengine.engine import Engine
    from zengine.features import Feature
    from zengine.pipeline_engine import PipelineEngine
    from zengine.verdict import LossScaleExhausted

__version__ = "0.2.0"

__all__ = [
    "CallOrderError",
    "ConfigError",
    "Culprit",
    "Engine",
    "Feature",
    "HalfLoaded",
    "LossScaleExhausted",
    "MicroStep",
    "PipelineEngine",
    "RanksDisagree",
    "StepReport",
    "add_config_arguments",
    "initialize",
]

# What takes parts of an engine with it is imported on first use, at the latest by `initialize`.
_HOME_OF = {
    "ConfigError": "zengine.config",
    "Engine": "zengine.engine",
    "Feature": "zengine.features",
    "LossScaleExhausted": "zengine.verdict",
    "PipelineEngine": "zengine.pipeline_engine",
    "RanksDisagree": "zengine.agreement",
}

__getattr__ = importing(__name__, _HOME_OF)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
