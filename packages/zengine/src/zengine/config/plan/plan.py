"""The resolved config: every question answered, nothing left to look up.

A `Config` says what a person wrote; a `Plan` says what will happen.  It holds no `None` and no "auto": "off" is
a value (an empty name, a factor of one, a count of zero), dtypes are `torch.dtype`, and the three batch sizes
agree with the number of replicas.  Each part of the engine is given its own piece and never sees the rest.

Rejected: one flat namespace of a hundred settings, as large engines have; nobody can say who reads which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

import zckpt
from zengine.config.keys.checkpoint import CheckpointSettings
from zengine.config.keys.parallel import ActivationCheckpointing, Pipeline
from zengine.config.keys.training import RunKeys, TrainingKeys
from zengine.config.plan.batch import BatchPlan
from zengine.config.plan.data import DataPlan
from zengine.config.plan.optimizer import OptimizerPlan, SchedulerPlan, optimizer_rows
from zengine.config.plan.parallel import ParallelPlan, parallel_rows
from zengine.config.plan.precision import PLAIN, NumericsPlan, Scaling, precision_rows
from zengine.config.plan.rows import PlanRow, lookup, rows, table, value_of
from zengine.config.plan.telemetry import ProfilingPlan, TelemetryPlan, profiling_rows, telemetry_rows
from zengine.config.plan.zero import zero_rows
from zpartition import SparseGradients, ZeroPolicy
from zprecision import Precision, Unscaled

__all__ = ["Plan"]


@attrs.frozen(kw_only=True)
class Plan(RunKeys):
    """Everything `assemble` needs: the keys that need no resolving, and one piece per part."""

    batch: BatchPlan
    parallel: ParallelPlan
    activations: ActivationCheckpointing  # where inputs of checkpointed blocks wait
    pipeline: Pipeline  # how a PipelineModule is run, and what it has to be
    precision: Precision
    scaling: Scaling
    cast_inputs: bool  # floating inputs of forward become precision.param
    zero: ZeroPolicy
    optimizer: OptimizerPlan
    scheduler: SchedulerPlan
    clip_norm: float  # global L2 norm that gradients are clipped to; 0 = off
    skip_nonfinite: bool  # an update with NaN or inf gradients is left out and reported
    telemetry: TelemetryPlan
    profiling: ProfilingPlan  # what looks into a run: FLOPs, a window of traces, collectives
    data: DataPlan
    checkpoint: CheckpointSettings
    keep: zckpt.RetentionPolicy  # which checkpoints stay when one is saved
    managed_accumulation: bool  # the engine decides which step() is a boundary; else every one is
    collect_garbage: bool = True  # Python's cyclic collector runs as ever while the engine lives
    numerics: NumericsPlan = PLAIN  # autocast, 8-bit layers
    offloads: Mapping[str, str] = attrs.field(factory=dict)  # "offload_optimizer", "offload_param" -> where they live
    leaf_modules: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)  # kind of name -> as they were given
    origins: Mapping[str, str] = attrs.field(factory=dict)  # key -> "file:line" | "dict" | "default" | ...
    notices: tuple[str, ...] = ()  # accepted keys without effect here, old names that were translated
    given: Mapping[str, Any] = attrs.field(factory=dict)  # the config as it was written

    @property
    def scales_losses(self) -> bool:
        """True if losses, and so gradients, are multiplied by a loss scale."""
        return not isinstance(self.scaling, Unscaled)

    def rows(self) -> Iterator[PlanRow]:
        """Every value under the key that sets it: a section yields its rows, the plan chains them."""
        dense = self.zero.sparse_gradients is SparseGradients.DENSE
        yield from rows("", self, RunKeys)
        yield from rows(
            "", self, TrainingKeys, sparse_gradients=not dense, disable_python_gc=not self.collect_garbage
        )
        yield from parallel_rows(self.parallel, self.pipeline, self.activations)
        yield from self.data.rows
        yield from optimizer_rows(self.optimizer, self.scheduler)
        yield from precision_rows(
            self.precision,
            self.scaling,
            self.numerics,
            self.zero.narrow_classes,
            cast_inputs=self.cast_inputs,
            skip_nonfinite=self.skip_nonfinite,
        )
        yield from zero_rows(self.zero, self.offloads, self.leaf_modules)
        yield from telemetry_rows(self.telemetry)
        yield from profiling_rows(self.profiling)
        yield from rows("checkpoint.", self.checkpoint, CheckpointSettings)

    def describe(self) -> str:
        """A table of every value with its origin, and the notices; for people."""
        return table(self.rows(), self.origins, self.notices)

    def __str__(self) -> str:
        return self.describe()

    def __getitem__(self, key: str) -> Any:
        """The resolved value of a key of the config: `plan["zero_optimization.stage"]`.

        Raises:
            KeyError: no value of the plan is set by that key; names the nearest.
        """
        return value_of(self.rows(), key)

    def get(self, key: str, default: Any = None) -> Any:
        """Like a dict's: `plan.get("zero_optimization")["stage"]`, as integrations ask of DeepSpeed's config."""
        return lookup(self.rows(), key, default)

    def origin(self, key: str) -> str:
        """Origin of the value of `key`: "file:line", "dict", "default", "derived" or "auto"."""
        value_of(self.rows(), key)
        return self.origins.get(key, "default")
