"""Optional behaviour as objects with hooks; a feature that is off is absent.

The order of features is the order of their hooks.  A feature gets a `Run` in `attach`, never the engine; it keeps no
tensors of a step, and saves its own state.
"""

from typing import TYPE_CHECKING

from zengine.imports import homes_below, lazy_attributes

if TYPE_CHECKING:
    from zengine.engine.feature import Feature
    from zengine.features.builtin import BackgroundSaves, Balancing, DumpState, PythonGC, Unfreezing
    from zengine.features.curriculum import SampleDifficulty, SeqlenCurriculum
    from zengine.features.dynamic_batching import DynamicBatching, ScaledRate
    from zengine.features.layer_drop import LayerDrop
    from zengine.features.measuring import LayerNorms, Measuring
    from zengine.features.random_ltd import RandomLtd
    from zengine.features.replicas import VerifyReplicas
    from zengine.features.same_batch import SameBatch
    from zengine.flops.feature import CountFlops

__all__ = [
    "BackgroundSaves",
    "Balancing",
    "CountFlops",
    "DumpState",
    "DynamicBatching",
    "Feature",
    "LayerDrop",
    "LayerNorms",
    "Measuring",
    "PythonGC",
    "RandomLtd",
    "SameBatch",
    "SampleDifficulty",
    "ScaledRate",
    "SeqlenCurriculum",
    "Unfreezing",
    "VerifyReplicas",
]

_HOME_OF = homes_below(
    "zengine",
    {
        "engine.feature": "Feature",
        "features.builtin": "BackgroundSaves Balancing DumpState PythonGC Unfreezing",
        "features.curriculum": "SampleDifficulty SeqlenCurriculum",
        "features.dynamic_batching": "DynamicBatching ScaledRate",
        "features.layer_drop": "LayerDrop",
        "features.measuring": "LayerNorms Measuring",
        "features.random_ltd": "RandomLtd",
        "features.replicas": "VerifyReplicas",
        "features.same_batch": "SameBatch",
        "flops.feature": "CountFlops",
    },
)  # imported on first use: a feature that is off is absent

__getattr__, __dir__ = lazy_attributes(__name__, _HOME_OF)
