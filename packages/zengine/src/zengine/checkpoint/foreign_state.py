"""Checks of saved states of torch's optimizers and schedules, whose classes load anything.

A schedule of torch replaces its attributes by those of the state, and a parameter group its options; a rate of [] or
a number in place of a method fails only steps later.  So a saved state is compared with the object's present one: it
must have the same structure, counts must be counts, and rates must be rates.  A caller's own class is checked by a
trial load instead (trial_load.py).
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

import zpartition
from zengine.trial_load import trial_load

__all__ = [
    "check_options",
    "check_states",
    "prepare_schedule",
    "restored_options",
    "saved_options",
    "set_option",
    "set_options",
]

_MOST_COUNTED = 2**53  # exact as a float
_RATE = re.compile(r"(.*_)?lrs?(\[\d+\])*")  # lr, base_lrs[0], _last_lr[1], ...
_LOW = {"last_epoch": -1.0}  # lower bounds other than 0
_FREE = ("best", "mode_worse")  # metrics, not bounded by anything
_UNTRIED = ("LBFGS", "SparseAdam")  # these need a closure, or sparse gradients
_NOT_OPTIONS = ("params", "param_names")  # keys of a group that are not options


# -- parameter groups ----------------------------------------------------------------------------


def saved_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the hyperparameters of each group, without options of the object, such as its state format."""
    left = {*_NOT_OPTIONS, *getattr(optimizer, "kept_options", ())}
    return [{key: value for key, value in group.items() if key not in left} for group in optimizer.param_groups]


def check_options(optimizer: torch.optim.Optimizer, groups: list[Any], *, complete: bool) -> None:
    """Check that `optimizer` can continue with these options of its groups.

    complete: every number for which the class has a default must be present.

    Raises:
        ValueError, TypeError: it cannot; the message names the group and the option.
    """
    own = getattr(optimizer, "check_loaded_options", None)
    kept = getattr(optimizer, "kept_options", ())
    for index, (given, ours) in enumerate(zip(groups, optimizer.param_groups)):
        where = f"groups[{index}]"
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise TypeError(f"{where} must be a dict of options, is {given!r}")
        if misplaced := [key for key in _NOT_OPTIONS if key in given]:
            raise ValueError(f"{where}.{misplaced[0]} is not an option")
        wanted = [key for key in optimizer.defaults if complete and _is_numeric(ours.get(key))]
        if missing := [key for key in dict.fromkeys(["lr", *wanted]) if key not in given]:
            raise ValueError(f"{where}.{missing[0]} is missing")
        for key in given.keys() & ours.keys() - set(kept):
            _check(f"{where}.{key}", given[key], ours[key], bounded=key in optimizer.defaults)
            _check_betas(f"{where}.{key}", given[key])
        if own is not None:
            with _errors_at(where):
                own(index, {key: value for key, value in given.items() if key not in kept})


def check_states(optimizer: torch.optim.Optimizer, staged: zpartition.StagedState) -> None:
    """Check that the optimizer can continue with its present options and the staged state.

    A class of torch is also tried: it updates a small matrix with the options of each group, and the state that it
    keeps for that must be present.

    Raises:
        ValueError: it cannot.
    """
    try:
        staged.check()
    except ValueError as error:
        options = "; ".join(map(_options_of, optimizer.param_groups))
        raise ValueError(f"groups with {options}: {error}") from error
    if not type(optimizer).__module__.startswith("torch.optim") or type(optimizer).__name__ in _UNTRIED:
        return
    needed = [_state_keys_of(optimizer, index) for index in range(len(optimizer.param_groups))]
    group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for holder, state, _ in staged.held:
        index = group_of[id(holder.tensor)]
        if missing := sorted(needed[index] - set(state)):
            raise ValueError(
                f"groups[{index}]: {type(optimizer).__name__} with {_options_of(optimizer.param_groups[index])} "
                f"keeps {missing[0]} of a parameter, which is not in the checkpoint"
            )


def _state_keys_of(optimizer: torch.optim.Optimizer, index: int) -> set[str]:
    """Return the state keys that the optimizer keeps for a matrix with the options of a group."""
    group = optimizer.param_groups[index]
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    matrix = torch.nn.Parameter(torch.zeros(2, 2, device=device))
    matrix.grad = torch.zeros_like(matrix)
    options = {key: copy.deepcopy(value) for key, value in group.items() if key not in _NOT_OPTIONS}
    accepted = inspect.signature(type(optimizer)).parameters
    try:
        tried = type(optimizer)([matrix], **{key: value for key, value in options.items() if key in accepted})
        tried.param_groups[0].update(options)
        tried.step()
    except Exception as error:  # torch raises any class
        raise ValueError(
            f"groups[{index}]: {type(optimizer).__name__} cannot step with {_options_of(group)}: {error}"
        ) from error
    return set(tried.state[matrix])


def _options_of(group: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in group.items() if key not in _NOT_OPTIONS)


def set_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
    """Set `options`, one dict for each group."""
    kept = getattr(optimizer, "kept_options", ())
    for group, values in zip(optimizer.param_groups, options):
        for key, value in values.items():
            if key not in kept:
                set_option(group, key, value)


def set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Set one option: in place if it is a tensor (a captured graph may hold it), as a number if it is a number."""
    ours = group.get(key)
    if isinstance(ours, torch.Tensor):
        ours.copy_(torch.as_tensor(value))
    else:
        group[key] = value.item() if isinstance(value, torch.Tensor) and _is_number(ours) else value


@contextmanager
def restored_options(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Restore the options of the groups after the block."""
    groups = [] if optimizer is None else optimizer.param_groups
    before = [
        (dict(group), {k: copy.deepcopy(v) for k, v in group.items() if k not in _NOT_OPTIONS}) for group in groups
    ]
    try:
        yield
    finally:
        for group, (members, values) in zip(groups, before):
            group.clear()
            group.update(members)
            for key, value in values.items():
                set_option(group, key, value)


# -- schedules -----------------------------------------------------------------------------------


def prepare_schedule(
    schedule: Any, optimizer: torch.optim.Optimizer | None, state: Mapping[str, Any]
) -> Callable[[], None]:
    """Return a function that loads `state` into a schedule, which is unchanged; raise if it does not fit."""
    if (own := getattr(schedule, "prepare_load", None)) is not None:
        prepared: Callable[[], None] = own(state)
        return prepared
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise TypeError(f"must be a state dict of a schedule, is {state!r}")
    present = schedule.state_dict()
    is_torchs = type(schedule).__module__.startswith("torch.optim")
    for key in state.keys() - present.keys():
        is_flag = key.startswith("_") and isinstance(state[key], (bool, type(None)))  # of another version of torch
        if hasattr(schedule, key) or (is_torchs and not is_flag):
            raise ValueError(f"{key} is not a value that a {type(schedule).__name__} saves")
    if is_torchs:
        _check("", state, present, bounded=True)
    with restored_options(optimizer):
        return trial_load(schedule, state, lambda: _check_rates(schedule, optimizer))


def _check_rates(schedule: Any, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise ValueError unless the schedule's last and computed rates have a valid number for each group."""
    if optimizer is None:
        return
    last = [schedule.get_last_lr()] if hasattr(schedule, "get_last_lr") else []
    for rates in [*last, *_compute_rates(schedule)]:
        if not isinstance(rates, (list, tuple)) or len(rates) != len(optimizer.param_groups):
            raise ValueError(f"has the rates {rates!r} for {len(optimizer.param_groups)} parameter groups")
        for index, rate in enumerate(rates):
            _check(f"lrs[{index}]", rate, 0.0, bounded=True)


def _compute_rates(schedule: Any) -> Iterator[Any]:
    """Yield the rates that a schedule of torch, and the schedules inside it, compute for their present step."""
    for part in getattr(schedule, "_schedulers", ()):
        yield from _compute_rates(part)
    if not type(schedule).__module__.startswith("torch.optim"):
        return
    with warnings.catch_warnings(), suppress(NotImplementedError):
        warnings.simplefilter("ignore")  # torch warns outside of a step
        yield schedule.get_lr()


# -- values --------------------------------------------------------------------------------------


def _check(where: str, saved: Any, ours: Any, *, bounded: bool) -> None:
    """Raise ValueError or TypeError, with the place, unless `saved` has the type and structure of `ours`.

    bounded: numbers must be finite, and not negative unless `ours` is.
    """
    if _is_number(ours):
        _check_number(where, saved, ours, bounded)
    elif isinstance(ours, (list, tuple)):
        if not isinstance(saved, (list, tuple)) or len(saved) != len(ours):
            raise TypeError(f"{where} must be {len(ours)} values, is {saved!r}")
        for index, (one, other) in enumerate(zip(saved, ours)):
            _check(f"{where}[{index}]", one, other, bounded=bounded)
    elif isinstance(ours, Mapping):
        _check_mapping(where, saved, ours, bounded)
    elif isinstance(ours, str) != isinstance(saved, str):
        raise TypeError(f"{where} must be {'a' if isinstance(ours, str) else 'no'} string, is {saved!r}")
    elif isinstance(ours, bool) and not (saved is None or isinstance(saved, bool)):
        raise TypeError(f"{where} must be True or False, is {saved!r}")
    elif ours is None and bounded and not (saved is None or isinstance(saved, bool)):
        if not where.endswith("]"):  # any of several values may be None
            raise TypeError(f"{where} must be None, True or False, is {saved!r}")
        _check_number(where, saved, 0.0, bounded)


def _check_mapping(where: str, saved: Any, ours: Mapping[Any, Any], bounded: bool) -> None:
    if not isinstance(saved, Mapping):
        raise TypeError(f"{where} must be a dict, is {saved!r}")
    if not all(isinstance(key, str) for key in ours):  # a table, such as milestones and their counts
        for number in [*saved, *saved.values()]:
            _check_number(where, number, 0, bounded)
        return
    dot = f"{where}." if where else ""
    for key, value in ours.items():
        if key in saved:
            _check(dot + key, saved[key], value, bounded=bounded)
        elif not (key.startswith("_") and isinstance(value, bool)):  # flags differ between versions of torch
            raise ValueError(f"{dot}{key} is missing")


def _check_number(where: str, saved: Any, ours: Any, bounded: bool) -> None:
    name = where.rpartition(".")[2]
    if not _is_number(saved) or (isinstance(saved, torch.Tensor) and not _can_replace(saved, ours)):
        raise TypeError(f"{where} must be a number, is {saved!r}")
    low, high = -math.inf, math.inf
    if (bounded and name not in _FREE) or _RATE.fullmatch(name):
        low = _LOW.get(name, 0.0) if ours >= 0 else -sys.float_info.max
        high = _max_of(ours) if not isinstance(saved, int) else _MOST_COUNTED
    if not low <= saved <= high:  # NaN neither
        raise ValueError(f"{where} must be a number from {low:g} to {high:g}, is {saved!r}")


def _can_replace(saved: torch.Tensor, ours: Any) -> bool:
    """Return True if a tensor may replace `ours`: of the same shape, or of shape () for a plain number."""
    if isinstance(ours, torch.Tensor):
        return saved.shape == ours.shape and saved.is_floating_point() == ours.is_floating_point()
    return saved.shape == () and saved.is_floating_point()


def _max_of(ours: Any) -> float:
    """Return the largest number that may replace `ours`."""
    if isinstance(ours, torch.Tensor):
        return torch.finfo(ours.dtype).max if ours.is_floating_point() else _MOST_COUNTED
    return _MOST_COUNTED if isinstance(ours, int) else sys.float_info.max


def _check_betas(where: str, saved: Any) -> None:
    if where.endswith(".betas") and not all(value < 1 for value in saved):
        raise ValueError(f"{where} must be numbers below 1, is {saved!r}")


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.dtype != torch.bool and not value.is_complex()
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_numeric(value: Any) -> bool:
    return _is_number(value) or (isinstance(value, (list, tuple)) and any(map(_is_number, value)))


@contextmanager
def _errors_at(where: str) -> Iterator[None]:
    """Prefix the message of errors inside with their place."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
