"""Options that are surely valid: a config is checked without torch, which takes a second to import.

The optimizers and schedules check their own options, and their messages say what is wrong.  These tables say less:
`certainly_accepts` is True if they accept the given options, and False if they have to be asked.  Options that depend
on each other, and lists with one value for each parameter group, are left to them.  Tests compare the names with the
signatures and the values with what is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["OPTIMIZER_OPTIONS", "SCHEDULE_OPTIONS", "certainly_accepts"]

Test = Callable[[Any], bool]


def certainly_accepts(table: Mapping[str, Mapping[str, Test]], name: object, options: Mapping[str, Any]) -> bool:
    """Return True if `name` certainly accepts `options`; False says nothing.

    table: OPTIMIZER_OPTIONS or SCHEDULE_OPTIONS.
    """
    row = table.get(str(name).lower() if table is OPTIMIZER_OPTIONS else str(name))
    if row is None or not set(options) <= set(row) or not _REQUIRED.get(str(name), set()) <= set(options):
        return False
    contradictory = {"fp32_optimizer_states", "state_dtype"} <= set(options)
    return not contradictory and all(row[option](value) for option, value in options.items())


def _within(low: float, high: float = math.inf) -> Test:
    """Accept finite numbers in [low, high)."""
    return lambda value: type(value) in (int, float) and low <= value < high and abs(value) < 1e300


def _whole(low: int) -> Test:
    return lambda value: type(value) is int and low <= value < 2**53


def _one_of(*values: object) -> Test:
    return lambda value: any(value is each or (type(value) is str and value == each) for each in values)


def _count_or_auto(value: Any) -> bool:
    return _whole(2)(value) or (type(value) is str and value == "auto")


def _optional(test: Test) -> Test:
    return lambda value: value is None or test(value)


def _pair(first: Test, second: Test) -> Test:
    return lambda value: type(value) in (list, tuple) and len(value) == 2 and first(value[0]) and second(value[1])


_SIZE, _FRACTION, _TRUTH = _within(0), _within(0, 1), _one_of(True, False)
_BETAS = _pair(_FRACTION, _FRACTION)
_FORMAT = {"state_dtype": _one_of(None, "fp32", "bf16", "8bit"), "split_master": _one_of(False)}
_RATES = {"lr": _SIZE, "weight_decay": _SIZE}
_USUAL = {
    **_RATES,
    **_FORMAT,
    "maximize": _TRUTH,
    "foreach": _one_of(None, False),  # both True contradict each other
    "fused": _one_of(None, False),
}
_ADAM = {
    **_USUAL,
    "betas": _BETAS,
    "eps": _SIZE,
    "amsgrad": _TRUTH,
    "bias_correction": _TRUTH,
    "adam_w_mode": _TRUTH,
    "torch_adam": _one_of(False),
    "fp32_optimizer_states": _TRUTH,
}

_ONE_BIT = {
    **_RATES,
    "betas": _BETAS,
    "eps": _SIZE,
    "bias_correction": _TRUTH,
    "eps_inside_sqrt": _TRUTH,
    "amsgrad": _one_of(False),
    "cuda_aware": _TRUTH,
    "comm_backend_name": _one_of("nccl", "mpi", "hccl", "compressed", "gloo"),
}

# Name in lower case -> option -> test.
OPTIMIZER_OPTIONS: Mapping[str, Mapping[str, Test]] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "sgd": {**_USUAL, "momentum": _SIZE, "dampening": _within(-math.inf), "nesterov": _one_of(False)},
    "adagrad": {
        **_USUAL,
        "lr_decay": _SIZE,
        "initial_accumulator_value": _SIZE,
        "eps": _SIZE,
        "fp32_optimizer_states": _TRUTH,
    },
    "lamb": {
        **_USUAL,
        "betas": _BETAS,
        "eps": _SIZE,
        "bias_correction": _TRUTH,
        "eps_inside_sqrt": _TRUTH,
        "min_coeff": _FRACTION,
        "max_coeff": _within(1),
    },
    "lion": {**_USUAL, "betas": _BETAS, "fp32_optimizer_states": _TRUTH},
    "muon": {
        **_RATES,
        **_FORMAT,
        "momentum": _FRACTION,
        "nesterov": _TRUTH,
        "muon_lr": _optional(_SIZE),
        "adam_lr": _optional(_SIZE),
        "betas": _BETAS,
        "eps": _SIZE,
        "ns_steps": _whole(1),
        "ns_method": _one_of("standard", "gram"),
        "adjust_lr": _one_of("original", "match_rms_adamw"),
    },
    "onebitadam": {**_ONE_BIT, "freeze_step": _count_or_auto},
    "zerooneadam": {
        **_ONE_BIT,
        "var_freeze_step": _whole(1),
        "var_update_scaler": _whole(1),
        "local_step_scaler": _whole(1),
        "local_step_clipper": _whole(1),
    },
    "onebitlamb": {
        **_ONE_BIT,
        "freeze_step": _count_or_auto,
        "min_coeff": _FRACTION,
        "max_coeff": _within(1),
        "coeff_beta": _FRACTION,
        "factor_min": _FRACTION,
        "factor_max": _within(1),
        "factor_threshold": _SIZE,
    },
    "adafactor": {
        **_RATES,
        "beta2_decay": _within(-math.inf, 0),
        "eps": _pair(_optional(_SIZE), _SIZE),
        "d": _within(1),
        "foreach": _one_of(None, False),
        "maximize": _TRUTH,
    },
}

_COUNT = {"last_batch_iteration": _whole(-1)}
_WARMUP = {
    **_COUNT,
    "warmup_num_steps": _whole(0),
    "warmup_type": _one_of("log", "linear"),
    "exact_peak": _TRUTH,
}
_WARMUP_LR = {**_WARMUP, "warmup_min_lr": _SIZE, "warmup_max_lr": _optional(_SIZE)}

# Name -> option -> test.
SCHEDULE_OPTIONS: Mapping[str, Mapping[str, Test]] = {
    "WarmupLR": _WARMUP_LR,
    "WarmupDecayLR": {**_WARMUP_LR, "total_num_steps": _whole(1)},
    "WarmupCosineLR": {
        **_WARMUP,
        "total_num_steps": _whole(1),
        "warmup_min_ratio": _SIZE,
        "cos_min_ratio": _SIZE,
    },
    "OneCycle": {
        **_COUNT,
        "cycle_min_lr": _SIZE,
        "cycle_max_lr": _SIZE,
        "decay_lr_rate": _SIZE,
        "cycle_first_step_size": _whole(1),
        "cycle_second_step_size": _optional(_whole(1)),
        "cycle_first_stair_count": _whole(0),
        "cycle_second_stair_count": _optional(_whole(0)),
        "decay_step_size": _whole(0),
        "cycle_momentum": _TRUTH,
        "cycle_min_mom": _FRACTION,
        "cycle_max_mom": _FRACTION,
        "decay_mom_rate": _within(0, 1e-300),  # else it depends on the updates
        "exact_peak": _TRUTH,
    },
    "LRRangeTest": {
        **_COUNT,
        "lr_range_test_min_lr": _SIZE,
        "lr_range_test_step_size": _whole(1),
        "lr_range_test_step_rate": _SIZE,
        "lr_range_test_staircase": _TRUTH,
    },
}

_REQUIRED = {
    "WarmupDecayLR": {"total_num_steps"},
    "WarmupCosineLR": {"total_num_steps"},
    "OneCycle": {"cycle_min_lr", "cycle_max_lr"},
}
