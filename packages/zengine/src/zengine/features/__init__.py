"""Optional behaviour as objects with hooks; a feature that is off is absent.

The order of the tuple given to the engine is the order of the hooks.  Features get the engine in `attach` and
nowhere else, must not keep tensors of the step they were called in, and save their own state.
"""

from zengine.features.background_saves import BackgroundSaves
from zengine.features.balancing import Balancing
from zengine.features.base import Feature
from zengine.features.count_flops import CountFlops
from zengine.features.curriculum import SampleDifficulty, SeqlenCurriculum
from zengine.features.dump_state import DumpState
from zengine.features.dynamic_batching import DynamicBatching
from zengine.features.layer_norms import LayerNorms
from zengine.features.measuring import Measuring
from zengine.features.python_gc import PythonGC
from zengine.features.random_ltd import RandomLtd
from zengine.features.same_batch import SameBatch
from zengine.features.unfreezing import Unfreezing

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
