"""`deepspeed.runtime.lr_schedules`: zoptim's schedules, DeepSpeed's names of their options, and its arguments."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from zoptim import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "LR_RANGE_TEST",
    "ONE_CYCLE",
    "VALID_LR_SCHEDULES",
    "WARMUP_COSINE_LR",
    "WARMUP_DECAY_LR",
    "WARMUP_LR",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
    "get_config_from_args",
    "get_lr_from_config",
    "get_torch_optimizer",
    "override_params",
    "parse_arguments",
    "update_lr",
]

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"
EDGE_VALUE = "edge_value"
MID_VALUE = "mid_value"
CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
CYCLE_FIRST_STAIR_COUNT = "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE = "cycle_second_step_size"
CYCLE_SECOND_STAIR_COUNT = "cycle_second_stair_count"
DECAY_STEP_SIZE = "decay_step_size"
CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MAX_LR = "cycle_max_lr"
DECAY_LR_RATE = "decay_lr_rate"
CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_MAX_MOM = "cycle_max_mom"
DECAY_MOM_RATE = "decay_mom_rate"
WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"
WARMUP_MIN_RATIO = "warmup_min_ratio"
COS_MIN_RATIO = "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"

# Arguments of the command line: name -> default; a bool is a switch.  -1 means "not given", as in DeepSpeed.
_RANGE_TEST: dict[str, Any] = {
    LR_RANGE_TEST_MIN_LR: 0.001,
    LR_RANGE_TEST_STEP_RATE: 1.0,
    LR_RANGE_TEST_STEP_SIZE: 1000,
    LR_RANGE_TEST_STAIRCASE: False,
}
_CYCLE: dict[str, Any] = {
    CYCLE_FIRST_STEP_SIZE: 1000,
    CYCLE_FIRST_STAIR_COUNT: -1,
    CYCLE_SECOND_STEP_SIZE: -1,
    CYCLE_SECOND_STAIR_COUNT: -1,
    DECAY_STEP_SIZE: 1000,
    CYCLE_MIN_LR: 0.01,
    CYCLE_MAX_LR: 0.1,
    DECAY_LR_RATE: 0.0,
    CYCLE_MIN_MOM: 0.8,
    CYCLE_MAX_MOM: 0.9,
    DECAY_MOM_RATE: 0.0,
}
_WARMUP: dict[str, Any] = {
    WARMUP_MIN_LR: 0.0,
    WARMUP_MAX_LR: 0.001,
    WARMUP_NUM_STEPS: 1000,
    WARMUP_TYPE: WARMUP_LOG_RATE,
}
_COSINE: dict[str, Any] = {
    WARMUP_NUM_STEPS: 1000,
    WARMUP_TYPE: WARMUP_LOG_RATE,
    WARMUP_MIN_RATIO: 0.01,
    COS_MIN_RATIO: 0.01,
}
_OPTIONS = {
    LR_RANGE_TEST: _RANGE_TEST,
    ONE_CYCLE: _CYCLE,
    WARMUP_LR: _WARMUP,
    WARMUP_DECAY_LR: _WARMUP,
    WARMUP_COSINE_LR: _COSINE,
}
_RATE_OF = {LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR, ONE_CYCLE: CYCLE_MAX_LR}  # others: WARMUP_MAX_LR


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--lr_schedule NAME` and an argument for each option of the schedules, with DeepSpeed's defaults."""
    group = parser.add_argument_group("Convergence Tuning", "learning-rate schedule")
    group.add_argument(f"--{LR_SCHEDULE}", type=str, default=None, help=f"one of {', '.join(VALID_LR_SCHEDULES)}")
    group.add_argument("--cycle_momentum", action="store_true", help="also cycle the momentum (OneCycle)")
    for name, default in {**_RANGE_TEST, **_CYCLE, **_WARMUP, **_COSINE}.items():
        if isinstance(default, bool):
            group.add_argument(f"--{name}", action="store_true", default=default, help="a switch")
        else:
            group.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line; return (these arguments, the unknown ones)."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def override_params(args: Any, params: dict[str, Any]) -> None:
    """Set the options of all schedules that `args` has in `params`."""
    for options in _OPTIONS.values():
        _override(args, params, options)


def _override(args: Any, params: dict[str, Any], options: Iterable[str]) -> None:
    params.update({name: getattr(args, name) for name in options if getattr(args, name, None) is not None})


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """Return (the config's section "scheduler", None) from parsed arguments, or (None, the reason)."""
    name = getattr(args, LR_SCHEDULE, None)
    if name is None:
        return None, f"--{LR_SCHEDULE} not specified on command line"
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not supported LR schedule: use one of {', '.join(VALID_LR_SCHEDULES)}"
    params: dict[str, Any] = {}
    _override(args, params, _OPTIONS[name])
    return {"type": name, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return (learning rate, "") of the section "scheduler" of a config, or (None, the reason)."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    name = config["type"]
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not a valid LR schedule: use one of {', '.join(VALID_LR_SCHEDULES)}"
    if name == WARMUP_COSINE_LR:
        return None, f"{name} multiplies the optimizer's lr by a ratio, so its params define no lr"
    return config["params"][_RATE_OF.get(name, WARMUP_MAX_LR)], ""


def update_lr(param_groups: Iterable[dict[str, Any]], lrs: Iterable[Any]) -> list[Any]:
    """Set the learning rate of each group; one in a tensor is filled.  Return them."""
    for group, lr in zip(param_groups, lrs):
        if isinstance(group["lr"], Tensor):
            with torch.no_grad():
                group["lr"].fill_(lr.squeeze() if isinstance(lr, Tensor) else lr)
        else:
            group["lr"] = lr
    return [group["lr"] for group in param_groups]


def get_torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer, or the one inside a wrapper.  Raises TypeError if neither is torch's."""
    for found in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(found, torch.optim.Optimizer):
            return found
    raise TypeError(f"{type(optimizer).__name__} is not a subclass of torch.optim.Optimizer, and wraps none")
