"""Plan: the resolved config.

A `Config` contains what the user wrote; a `Plan` contains the resulting values.  It has no `None` and no "auto":
"off" is a value (an empty name, a factor of one, a count of zero), dtypes are `torch.dtype`, and the three batch
sizes agree with the number of replicas.  Each part of the engine receives its own part of the plan and no other.

Rejected: one flat namespace of a hundred settings, as large engines have; its readers cannot be traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

import zckpt
from zengine.config.keys.autotuning import Autotuning
from zengine.config.keys.checkpoint import CheckpointSettings
from zengine.config.keys.compression import CompressionTraining
from zengine.config.keys.faults import FaultKeys
from zengine.config.keys.features import (
    BlockEigenvalues,
    DiLoCo,
    Elasticity,
    FeatureKeys,
    HybridEngine,
    ProgressiveLayerDrop,
    QuantizeTraining,
    SparseAttention,
)
from zengine.config.keys.parallel import ActivationCheckpointing, Pipeline
from zengine.config.keys.training import RunKeys, TrainingKeys
from zengine.config.keys.zero import ZenFlow
from zengine.config.plan.batch import BatchPlan
from zengine.config.plan.data import DataPlan
from zengine.config.plan.moq import MoqPlan
from zengine.config.plan.optimizer import OptimizerPlan, SchedulerPlan, optimizer_rows
from zengine.config.plan.parallel import ParallelPlan, parallel_rows
from zengine.config.plan.precision import PLAIN, NumericsPlan, Scaling, precision_rows
from zengine.config.plan.rows import PlanRow, lookup, rows, table, value_of
from zengine.config.plan.techniques.compression import group_rows
from zengine.config.plan.telemetry import ProfilingPlan, TelemetryPlan, profiling_rows, telemetry_rows
from zengine.config.plan.zero import zenflow_rows, zero_rows
from zpartition import SparseGradients, ZeroPolicy
from zprecision import Precision, Unscaled

__all__ = ["Plan"]


@attrs.frozen(kw_only=True)
class Plan(FaultKeys, RunKeys):
    """Input of `assemble`: the keys that need no resolution, and one value per part of the engine."""

    batch: BatchPlan
    parallel: ParallelPlan
    activations: ActivationCheckpointing  # storage of the inputs of checkpointed blocks
    pipeline: Pipeline  # schedule and expected properties of a PipelineModule
    precision: Precision
    scaling: Scaling
    cast_inputs: bool  # floating-point inputs of forward are cast to precision.param
    zero: ZeroPolicy
    zenflow: ZenFlow  # as written; the data's steps per epoch are not known yet
    optimizer: OptimizerPlan
    scheduler: SchedulerPlan
    clip_norm: float  # maximum global L2 norm of the gradients; 0: off
    skip_nonfinite: bool  # an update with NaN or inf gradients is skipped and reported
    telemetry: TelemetryPlan
    profiling: ProfilingPlan  # FLOPs, a window of traces, collectives
    data: DataPlan
    progressive_layer_drop: ProgressiveLayerDrop
    sparse_attention: SparseAttention
    eigenvalue: BlockEigenvalues
    quantize_training: QuantizeTraining
    moq: MoqPlan  # what quantize_training asks for
    elasticity: Elasticity
    autotuning: Autotuning
    diloco: DiLoCo
    hybrid_engine: HybridEngine
    compression_training: CompressionTraining
    checkpoint: CheckpointSettings
    keep: zckpt.RetentionPolicy  # retention of old checkpoints after each save
    loads_full_masters: bool  # False: load_checkpoint rounds masters to the dtype of the weights
    managed_accumulation: bool  # the engine finds the boundaries; False: every step() is one
    collect_garbage: bool = True  # False: Python's cyclic garbage collector is off while the engine is open
    numerics: NumericsPlan = PLAIN  # autocast, 8-bit layers
    offloads: Mapping[str, str] = attrs.field(factory=dict)  # "offload_optimizer", "offload_param" -> device
    leaf_modules: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)  # kind of name -> names as given
    origins: Mapping[str, str] = attrs.field(factory=dict)  # key -> "file:line" | "dict" | "default" | ...
    notices: tuple[str, ...] = ()  # keys without effect, renamed keys, unexpected defaults
    given: Mapping[str, Any] = attrs.field(factory=dict)  # the config as it was written

    @property
    def scales_losses(self) -> bool:
        """True if losses, and hence gradients, are multiplied by a loss scale."""
        return not isinstance(self.scaling, Unscaled)

    @property
    def eigenvalues(self) -> BlockEigenvalues:
        """Section eigenvalue that is on: of quantize_training, where DeepSpeed has it, or of the top level."""
        inner = self.quantize_training.eigenvalue
        return inner if self.quantize_training.enabled and inner.enabled else self.eigenvalue

    def rows(self) -> Iterator[PlanRow]:
        """Yield every value under the key that sets it."""
        dense = self.zero.sparse_gradients is SparseGradients.DENSE
        yield from rows("", self, RunKeys)
        yield from rows(
            "", self, TrainingKeys, sparse_gradients=not dense, disable_python_gc=not self.collect_garbage
        )
        yield from parallel_rows(self.parallel, self.pipeline, self.activations)
        yield from self.data.rows
        yield from rows("", self, FeatureKeys)
        yield from group_rows(self.compression_training, self.origins)
        yield from optimizer_rows(self.optimizer, self.scheduler)
        yield from precision_rows(
            self.precision,
            self.scaling,
            self.numerics,
            self.zero.narrow_classes,
            cast_inputs=self.cast_inputs,
            skip_nonfinite=self.skip_nonfinite,
        )
        yield from zero_rows(self.zero, self.offloads, self.leaf_modules, self.loads_full_masters)
        yield from zenflow_rows(self.zenflow)
        yield from telemetry_rows(self.telemetry)
        yield from profiling_rows(self.profiling)
        yield from rows("checkpoint.", self.checkpoint, CheckpointSettings)
        yield from rows("", self, FaultKeys)

    def describe(self) -> str:
        """Return a table of every value with its origin, and the notices."""
        return table(self.rows(), self.origins, self.notices)

    def __str__(self) -> str:
        return self.describe()

    def __getitem__(self, key: str) -> Any:
        """Return the resolved value of a key of the config: `plan["zero_optimization.stage"]`.

        Raises:
            KeyError: no value of the plan has that key; names the nearest.
        """
        return value_of(self.rows(), key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value or a section as a dict's `get` does: `plan.get("zero_optimization")["stage"]`."""
        return lookup(self.rows(), key, default)

    def origin(self, key: str) -> str:
        """Return the origin of the value of `key`: "file:line", "dict", "default", "derived" or "auto"."""
        value_of(self.rows(), key)
        return self.origins.get(key, "default")
