"""Optimizer and schedule of a plan, and the dtype of the optimizer's states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch

from zengine.config.keys.root import Settings
from zengine.config.keys.training import Optimizer, Scheduler
from zengine.config.plan.rows import PlanRow, rows
from zengine.config.reading.choices import accepts_option
from zengine.config.reading.load import Config
from zprecision import Precision

__all__ = ["OptimizerPlan", "SchedulerPlan", "is_narrow", "optimizer_notices", "optimizer_plan", "optimizer_rows"]


@attrs.frozen(kw_only=True)
class OptimizerPlan:
    """Optimizer to build by name; an empty type means that the caller passes one."""

    type: str = ""
    params: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class SchedulerPlan:
    """Learning-rate schedule to build by name; an empty type means none, or the caller's."""

    type: str = ""
    params: Mapping[str, Any] = attrs.field(factory=dict)


COMPRESSED = ("onebitadam", "zerooneadam", "onebitlamb")  # in lower case: they communicate themselves
_IGNORED_BY_COMPRESSED = ("bias_correction", "eps_inside_sqrt", "cuda_aware", "comm_backend_name")


def optimizer_plan(settings: Settings, dtypes: Precision) -> OptimizerPlan:
    """Return the optimizer, with an explicit `state_dtype` if the masters have 16 bits.

    Without it the states would have the masters' dtype, as in torch; DeepSpeed's keys mean float32 unless
    bf16_optimizer_states is on.
    """
    name, params = settings.optimizer.type, dict(settings.optimizer.params)
    if name and not _sets_state_dtype(params) and is_narrow(dtypes.master):
        wanted = "bf16" if settings.bf16.bf16_optimizer_states else "fp32"
        if accepts_option(name, params, "state_dtype", wanted):
            params["state_dtype"] = wanted
    return OptimizerPlan(type=name, params=params)


def optimizer_rows(optimizer: OptimizerPlan, scheduler: SchedulerPlan) -> Iterator[PlanRow]:
    """Yield the rows of both sections, option by option."""
    for section, settings, part in (("optimizer", Optimizer, optimizer), ("scheduler", Scheduler, scheduler)):
        yield from rows(f"{section}.", part, settings, skip=("params",))
        yield from ((f"{section}.params.{name}", value) for name, value in part.params.items())


def is_narrow(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.itemsize < torch.float32.itemsize


def _sets_state_dtype(params: Mapping[str, Any]) -> bool:
    return params.get("state_dtype") is not None or "fp32_optimizer_states" in params


def optimizer_notices(config: Config, dtypes: Precision) -> list[str]:
    """Return notices about options without effect, and about the precision of 16-bit masters and states."""
    return [*_decay_notices(config), *_compressed_notices(config), *_narrow_notices(config, dtypes)]


def _compressed_notices(config: Config) -> list[str]:
    """Return a notice about options that the compressed optimizers accept and ignore, as DeepSpeed's do."""
    optimizer = config.settings.optimizer
    if optimizer.type.lower() not in COMPRESSED:
        return []
    found = [name for name in _IGNORED_BY_COMPRESSED if name in optimizer.params]
    if not found:
        return []
    keys = ", ".join(f"optimizer.params.{name}" for name in found)
    return [
        f"{config.origin(f'optimizer.params.{found[0]}')}: {keys} {'has' if len(found) == 1 else 'have'} no effect: "
        f"{optimizer.type} never corrects the bias of moments, adds eps outside of the root, and communicates as the "
        "run does"
    ]


def _decay_notices(config: Config) -> list[str]:
    """Return a notice if "AdamW" overrides adam_w_mode, as in DeepSpeed."""
    optimizer, key = config.settings.optimizer, "optimizer.params.adam_w_mode"
    if optimizer.type.lower() != "adamw" or optimizer.params.get("adam_w_mode", True):
        return []
    return [
        f'{config.origin(key)}: {key} = false has no effect here: "AdamW" decouples the weight decay, as in '
        'DeepSpeed. For an L2 penalty write "type": "Adam"'
    ]


def _narrow_notices(config: Config, dtypes: Precision) -> list[str]:
    settings, name = config.settings, config.settings.optimizer.type
    asked = "bf16.bf16_master_weights_and_grads"
    if (
        settings.bf16.enabled == "auto"
        and settings.bf16.bf16_master_weights_and_grads
        and not is_narrow(dtypes.master)
    ):
        return [f"{config.origin(asked)}: {asked} has no effect here: bf16.enabled resolves to float32"]
    if not is_narrow(dtypes.master):
        return _states_notices(config)
    if not name:
        return []
    notices = []
    chosen = optimizer_plan(settings, dtypes).params
    dtype = str(dtypes.master).removeprefix("torch.")
    if not _sets_state_dtype(chosen):
        notices.append(f"{name} has no option state_dtype: its states have the dtype of the masters, {dtype}")
    if dtypes.master == torch.float16 or not accepts_option(name, settings.optimizer.params, "state_dtype", "bf16"):
        share = 2**8 if dtype == "bfloat16" else 2**11
        notices.append(
            f"masters in {dtype} are rounded to nearest by {name}: an update below 1/{share} of its weight is lost. "
            "zoptim's AdamW and similar optimizers round bf16 masters stochastically"
        )
    return notices


def _states_notices(config: Config) -> list[str]:
    """Return a notice if fp32_optimizer_states = false has no effect because the masters are float32."""
    key = "optimizer.params.fp32_optimizer_states"
    params = config.settings.optimizer.params
    if params.get("fp32_optimizer_states") is not False or params.get("state_dtype") is not None:
        return []
    return [
        f"{config.origin(key)}: {key} = false has no effect here: it selects the dtype of the masters, which is "
        'float32. For smaller states write "state_dtype": "bf16"'
    ]
