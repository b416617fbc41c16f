"""Optional behaviour as objects with hooks; a feature that is off is absent.

The order of the tuple given to the engine is the order of the hooks.  A feature gets a `Run` in `attach`, never the
engine; it keeps no tensors of the step it was called in, and saves its own state.
"""

from zengine.engine.feature import Feature
from zengine.features.builtin import BackgroundSaves, Balancing, DumpState, PythonGC, Unfreezing
from zengine.features.curriculum import SampleDifficulty, SeqlenCurriculum
from zengine.features.dynamic_batching import DynamicBatching
from zengine.features.layer_norms import LayerNorms
from zengine.features.measuring import Measuring
from zengine.features.random_ltd import RandomLtd
from zengine.features.same_batch import SameBatch
from zengine.flops.count import CountFlops

__all__ = [
    "BackgroundSaves",
    "Balancing",
    "CountFlops",
    "DumpState",
    "DynamicBatching",
    "Feature",
    "LayerNorms",
    "Measuring",
    "PythonGC",
    "RandomLtd",
    "SameBatch",
    "SampleDifficulty",
    "SeqlenCurriculum",
    "Unfreezing",
]
