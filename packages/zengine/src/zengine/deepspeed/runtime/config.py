"""`deepspeed.runtime.config`: names of optimizers, and a config to inspect before an engine exists."""

from __future__ import annotations

from typing import Any, final

from zengine.config import ConfigError as DeepSpeedConfigError
from zengine.config import Facts, Plan, load, resolve
from zengine.deepspeed.comm.world import get_world_size
from zengine.deepspeed.runtime.constants import (
    GRADIENT_ACCUMULATION_STEPS,
    GRADIENT_CLIPPING,
    TRAIN_BATCH_SIZE,
    TRAIN_MICRO_BATCH_SIZE_PER_GPU,
)

__all__ = [
    "ADAGRAD_OPTIMIZER",
    "ADAMW_OPTIMIZER",
    "ADAM_OPTIMIZER",
    "DEEPSPEED_OPTIMIZERS",
    "GRADIENT_ACCUMULATION_STEPS",
    "GRADIENT_CLIPPING",
    "LAMB_OPTIMIZER",
    "LION_OPTIMIZER",
    "MUON_OPTIMIZER",
    "TRAIN_BATCH_SIZE",
    "TRAIN_MICRO_BATCH_SIZE_PER_GPU",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
]

ADAGRAD_OPTIMIZER = "adagrad"
ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUON_OPTIMIZER = "muon"
DEEPSPEED_OPTIMIZERS = [
    ADAGRAD_OPTIMIZER,
    ADAM_OPTIMIZER,
    ADAMW_OPTIMIZER,
    LAMB_OPTIMIZER,
    LION_OPTIMIZER,
    MUON_OPTIMIZER,
]

TORCH_ADAM_PARAM = "torch_adam"
ADAM_W_MODE = "adam_w_mode"
ADAM_W_MODE_DEFAULT = True


@final
class DeepSpeedConfig:
    """Config, read and resolved for the current world size; attributes have DeepSpeed's names.

    config: path, dict or JSON text.  Raises ConfigError (DeepSpeedConfigError) as `initialize` would.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        ranks = get_world_size(None if mpu is None else mpu.get_data_parallel_group())
        self.plan: Plan = resolve(load(config), Facts(world_size=ranks, replicas=ranks))
        self.train_batch_size = self.plan.batch.train_batch_size
        self.train_micro_batch_size_per_gpu = self.plan.batch.micro_batch_size
        self.gradient_accumulation_steps = self.plan.batch.accumulation
        self.gradient_clipping = self.plan.clip_norm
        self.zero_optimization_stage = self.plan.zero.stage
        self.optimizer_name = self.plan.optimizer.type.lower() or None
        self.optimizer_params = dict(self.plan.optimizer.params) or None
        self.scheduler_name = self.plan.scheduler.type or None
        self.scheduler_params = dict(self.plan.scheduler.params) or None
        self.monitor_config = self.plan.telemetry  # for `MonitorMaster`

    def print(self, name: str = "DeepSpeedConfig") -> None:
        """Print the resolved plan with the origin of each value."""
        print(f"{name}:\n{self.plan.describe()}")
