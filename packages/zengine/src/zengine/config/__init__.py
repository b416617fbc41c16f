"""Configuration: strict to read, pure to resolve.

    config = load("config.json")                                   # what a person wrote; every problem at once
    plan = resolve(config, Facts(world_size=8, replicas=8))        # what will happen; nothing left to look up
    print(plan.describe())                                         # every value with its origin

The keys are DeepSpeed's.  Each known one is honoured, or accepted where it has no effect and said so, or refused with
the reason; an unknown one is an error with the name that was probably meant.
"""

from __future__ import annotations

from zengine.config.data_plan import DataPlan
from zengine.config.errors import ConfigError, Place, Problem
from zengine.config.load import Config, load
from zengine.config.plan import (
    BatchPlan,
    Facts,
    MonitorPlan,
    OptimizerPlan,
    Plan,
    SchedulerPlan,
    TelemetryPlan,
)
from zengine.config.resolve import resolve
from zengine.config.rules import violations
from zengine.config.schema import Settings

__all__ = [
    "BatchPlan",
    "Config",
    "ConfigError",
    "DataPlan",
    "Facts",
    "MonitorPlan",
    "OptimizerPlan",
    "Place",
    "Plan",
    "Problem",
    "SchedulerPlan",
    "Settings",
    "TelemetryPlan",
    "load",
    "resolve",
    "violations",
]
