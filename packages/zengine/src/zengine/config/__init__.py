"""Configuration: strict to read, pure to resolve.

    config = load("config.json")                                   # as written; reports every problem at once
    plan = resolve(config, Facts(world_size=8, replicas=8))        # every value resolved
    print(plan.describe())                                         # every value with its origin

Every DeepSpeed key is honoured, ignored with a one-time notice, or rejected with an explanation.  An unknown key is
an error that suggests the nearest known name.

Folders, each of which imports only earlier ones: `grammar` (kinds of values, rows, sources, errors), `keys` (one row
for each key), `reading` (from a document to settings), `plan` (from settings to values for the engine).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zengine.imports import homes_below, lazy_attributes

if TYPE_CHECKING:
    from zengine.config.grammar.errors import ConfigError, Place, Problem
    from zengine.config.keys.root import Settings
    from zengine.config.plan.batch import BatchPlan
    from zengine.config.plan.data import DataPlan
    from zengine.config.plan.facts import Facts
    from zengine.config.plan.optimizer import OptimizerPlan, SchedulerPlan
    from zengine.config.plan.plan import Plan
    from zengine.config.plan.resolve import resolve
    from zengine.config.plan.rules import violations
    from zengine.config.plan.telemetry import TelemetryPlan
    from zengine.config.reading.load import Config, load

__all__ = [
    "BatchPlan",
    "Config",
    "ConfigError",
    "DataPlan",
    "Facts",
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

# Each monitor's plan is its section of the config: plan.telemetry.csv_monitor, .wandb, ...
RENAMED = {"MonitorPlan": "zengine.config.TelemetryPlan"}

_HOME_OF = homes_below(
    __name__,
    {
        "grammar.errors": "ConfigError Place Problem",
        "keys.root": "Settings",
        "plan.batch": "BatchPlan",
        "plan.data": "DataPlan",
        "plan.facts": "Facts",
        "plan.optimizer": "OptimizerPlan SchedulerPlan",
        "plan.plan": "Plan",
        "plan.resolve": "resolve",
        "plan.rules": "violations",
        "plan.telemetry": "TelemetryPlan",
        "reading.load": "Config load",
    },
)  # imported on first use: a config is checked without torch, and resolved with it

__getattr__, __dir__ = lazy_attributes(__name__, _HOME_OF, RENAMED)
