"""The resolved config: every question answered, nothing left to look up.

A `Config` says what a person wrote; a `Plan` says what will happen.  It holds no `None` and no "auto": "off" is
a value (an empty name, a factor of one, a count of zero), dtypes are `torch.dtype`, and the three batch sizes
agree with the number of replicas.  Each part of the engine is given its own piece and never sees the rest.

Rejected: one flat namespace of a hundred settings, as large engines have; nobody can say who reads which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

import zckpt
from zengine.config.activation_settings import ActivationCheckpointing
from zengine.config.data_plan import DataPlan
from zengine.config.describe import looked_up, table, value_of
from zengine.config.numerics import PLAIN, NumericsPlan
from zengine.config.parallel import ParallelPlan
from zengine.config.pipeline import PipelinePlan
from zengine.config.profiling import ProfilingPlan
from zengine.config.telemetry import MonitorPlan, TelemetryPlan
from zpartition import ZeroPolicy
from zprecision import DynamicScaling, Precision, StaticScaling, Unscaled

__all__ = [
    "BatchPlan",
    "DataPlan",
    "Facts",
    "MonitorPlan",
    "OptimizerPlan",
    "ParallelPlan",
    "Plan",
    "SchedulerPlan",
    "TelemetryPlan",
]


@attrs.frozen(kw_only=True)
class Facts:
    """What only the machine knows when a config is resolved."""

    world_size: int  # processes in the run
    replicas: int  # copies of the model as it comes: over these the config lays out its own degrees
    device_type: str = "cpu"  # "cpu" | "cuda"
    ranks_per_host: int = 0  # processes on each machine; 0: nobody knows, or it does not matter
    bf16_is_faster: bool = False  # measured: a bf16 matmul beats an fp32 one here
    axes: Mapping[str, int] = attrs.field(factory=dict)  # degrees that the caller has laid out, by zcomm's axes
    laid_out_by: str = ""  # "mesh=", "mpu=", "the model"; for errors

    def __attrs_post_init__(self) -> None:
        if self.world_size < 1 or self.replicas < 1 or self.world_size % self.replicas:
            raise ValueError(
                f"Facts(world_size={self.world_size}, replicas={self.replicas}): both must be at least 1 "
                "and replicas must divide world_size"
            )


@attrs.frozen(kw_only=True)
class BatchPlan:
    """Invariant: train_batch_size == micro_batch_size * accumulation * replicas."""

    train_batch_size: int  # samples per optimizer step, over all replicas
    micro_batch_size: int  # samples per forward on one rank
    accumulation: int  # micro-steps per optimizer step
    replicas: int  # data-parallel copies of the model


@attrs.frozen(kw_only=True)
class OptimizerPlan:
    """The optimizer to build by name; an empty type means that the caller brings one."""

    type: str = ""
    params: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class SchedulerPlan:
    """The learning-rate schedule to build by name; an empty type means none, or the caller's."""

    type: str = ""
    params: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Plan:
    """Everything `assemble` needs, one piece per part."""

    batch: BatchPlan
    parallel: ParallelPlan
    activations: ActivationCheckpointing  # where inputs of checkpointed blocks wait
    pipeline: PipelinePlan
    precision: Precision
    scaling: Unscaled | StaticScaling | DynamicScaling
    cast_inputs: bool  # floating inputs of forward become precision.param
    zero: ZeroPolicy
    optimizer: OptimizerPlan
    scheduler: SchedulerPlan
    clip_norm: float  # global L2 norm that gradients are clipped to; 0 = off
    skip_nonfinite: bool  # an update with NaN or inf gradients is left out and reported
    telemetry: TelemetryPlan
    profiling: ProfilingPlan  # what looks into a run: FLOPs, a window of traces, collectives
    data: DataPlan
    async_save: bool  # checkpoints are written behind the loop's back
    keep: zckpt.Keep  # which checkpoints stay when one is saved
    tag_validation: str  # "IGNORE" | "WARN" | "FAIL": ranks that name different checkpoint tags
    dump_state: bool  # print the plan at start
    log_level: str  # "" leaves the loggers alone
    managed_accumulation: bool  # the engine decides which step() is a boundary; else every one is
    collect_garbage: bool = True  # Python's cyclic collector runs as ever while the engine lives
    config_version: str = ""  # the release whose defaults hold; "" = the present one
    numerics: NumericsPlan = PLAIN  # autocast, 8-bit layers
    offloads: Mapping[str, str] = attrs.field(factory=dict)  # "offload_optimizer", "offload_param" -> where they live
    leaf_modules: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)  # kind of name -> as they were given
    origins: Mapping[str, str] = attrs.field(factory=dict)  # key -> "file:line" | "dict" | "default" | ...
    notices: tuple[str, ...] = ()  # accepted keys without effect here, old names that were translated
    given: Mapping[str, Any] = attrs.field(factory=dict)  # the config as it was written

    @property
    def scales_losses(self) -> bool:
        """Whether losses, and so gradients, are multiplied by a loss scale."""
        return not isinstance(self.scaling, Unscaled)

    def describe(self) -> str:
        """A table of every value with its origin, and the notices; for people."""
        return table(self)

    def __str__(self) -> str:
        return self.describe()

    def __getitem__(self, key: str) -> Any:
        """What became of a key of the config: `plan["zero_optimization.stage"]`.

        Raises:
            KeyError: no value of the plan is set by that key; names the nearest.
        """
        return value_of(self, key)

    def get(self, key: str, default: Any = None) -> Any:
        """Like a dict's: `plan.get("zero_optimization")["stage"]`, as integrations ask of DeepSpeed's config."""
        return looked_up(self, key, default)

    def origin(self, key: str) -> str:
        """Where the value of `key` comes from: "file:line", "dict", "default", "derived" or "auto"."""
        value_of(self, key)
        return self.origins.get(key, "default")
