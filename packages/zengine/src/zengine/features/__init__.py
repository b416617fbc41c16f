"""Optional behaviour as objects with hooks; a feature that is off is absent.

The order of features is the order of their hooks.  A feature gets a `Run` in `attach`, never the engine; it keeps no
tensors of a step, and saves its own state.
"""

from typing import TYPE_CHECKING

from zengine.imports import homes_below, lazy_attributes

if TYPE_CHECKING:
    from zengine.engine.feature import Feature
    from zengine.features.builtin import (
        BackgroundSaves,
        Balancing,
        DumpState,
        GradientErrors,
        PythonGC,
        UnevenRows,
        Unfreezing,
    )
    from zengine.features.compressed_optimizer import CompressedOptimizer, check_compressed_optimizer
    from zengine.features.compression import CompressionSchedule
    from zengine.features.curriculum import SampleDifficulty, SeqlenCurriculum
    from zengine.features.distillation import Teaching
    from zengine.features.dynamic_batching import DynamicBatching, ScaledRate
    from zengine.features.eigenvalues import Eigenvalues
    from zengine.features.layer_drop import LayerDrop
    from zengine.features.local_rounds import GradientsOfAllGroups, LocalRounds
    from zengine.features.measuring import LayerNorms, Measuring
    from zengine.features.moq import MixtureOfQuantization
    from zengine.features.random_ltd import RandomLtd
    from zengine.features.replicas import VerifyReplicas
    from zengine.features.same_batch import SameBatch
    from zengine.features.trial_run import trial_features
    from zengine.features.zenflow import SelectiveState
    from zengine.flops.feature import CountFlops

__all__ = [
    "BackgroundSaves",
    "Balancing",
    "CompressedOptimizer",
    "CompressionSchedule",
    "CountFlops",
    "DumpState",
    "DynamicBatching",
    "Eigenvalues",
    "Feature",
    "GradientErrors",
    "GradientsOfAllGroups",
    "LayerDrop",
    "LayerNorms",
    "LocalRounds",
    "Measuring",
    "MixtureOfQuantization",
    "PythonGC",
    "RandomLtd",
    "SameBatch",
    "SampleDifficulty",
    "ScaledRate",
    "SelectiveState",
    "SeqlenCurriculum",
    "Teaching",
    "UnevenRows",
    "Unfreezing",
    "VerifyReplicas",
    "check_compressed_optimizer",
    "trial_features",
]

_HOME_OF = homes_below(
    "zengine",
    {
        "engine.feature": "Feature",
        "features.builtin": "BackgroundSaves Balancing DumpState GradientErrors PythonGC UnevenRows Unfreezing",
        "features.compressed_optimizer": "CompressedOptimizer check_compressed_optimizer",
        "features.compression": "CompressionSchedule",
        "features.curriculum": "SampleDifficulty SeqlenCurriculum",
        "features.distillation": "Teaching",
        "features.dynamic_batching": "DynamicBatching ScaledRate",
        "features.eigenvalues": "Eigenvalues",
        "features.layer_drop": "LayerDrop",
        "features.local_rounds": "GradientsOfAllGroups LocalRounds",
        "features.measuring": "LayerNorms Measuring",
        "features.moq": "MixtureOfQuantization",
        "features.random_ltd": "RandomLtd",
        "features.replicas": "VerifyReplicas",
        "features.same_batch": "SameBatch",
        "features.trial_run": "trial_features",
        "features.zenflow": "SelectiveState",
        "flops.feature": "CountFlops",
    },
)  # imported on first use: a feature that is off is absent

__getattr__, __dir__ = lazy_attributes(__name__, _HOME_OF)
