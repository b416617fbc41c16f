"""Table of all keys that a config may contain, as one tree.

`Settings` has the values of the honoured keys.  `ROOT` is data: `structure` reads a document by it, and the
suggestions, CONFIG.md, the JSON Schema and the tests walk it.  Each module of this folder has a class for its keys of
the top level; `Settings` inherits from all of them (without slots, which Python cannot merge).
"""

from __future__ import annotations

import attrs

from zengine.config.grammar.table import section_of
from zengine.config.keys import absent, checkpoint, precision, training
from zengine.config.keys.checkpoint import CheckpointKeys
from zengine.config.keys.data import DataKeys
from zengine.config.keys.faults import FaultKeys
from zengine.config.keys.features import FeatureKeys
from zengine.config.keys.parallel import ParallelKeys
from zengine.config.keys.precision import PrecisionKeys
from zengine.config.keys.telemetry import MonitorKeys, ProfilingKeys
from zengine.config.keys.training import RunKeys, TrainingKeys
from zengine.config.keys.zero import ZeroKeys

__all__ = ["ROOT", "Settings"]


@attrs.frozen(kw_only=True, slots=False)
class Settings(
    FeatureKeys,
    FaultKeys,
    DataKeys,
    ParallelKeys,
    CheckpointKeys,
    ProfilingKeys,
    MonitorKeys,
    ZeroKeys,
    PrecisionKeys,
    TrainingKeys,
    RunKeys,
):
    """Top level of a config; fields are in the order of the bases from the last to the first."""


ROOT = section_of(Settings, {**training.OTHERS, **precision.OTHERS, **checkpoint.OTHERS, **absent.OTHERS})
