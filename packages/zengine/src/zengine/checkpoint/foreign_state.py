"""States of torch's own classes, which take whatever they are given, looked at before they get it.

A schedule of torch's replaces its attributes by those of the state, a parameter group its options; a rate of [] or a
number in the place of a method shows steps later.  What an object has now is the measure: a state must be made of
the same things, counts must be counts and rates must be rates.  What a class of the caller's own keeps is its own
business; there the object is asked (rehearse.py).
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
from zengine.rehearse import rehearsed

__all__ = [
    "check_options",
    "check_states",
    "options_put_back",
    "prepare_schedule",
    "set_option",
    "set_options",
    "travelling_options",
]

_MOST_COUNTED = 2**53  # exact as a float
_RATE = re.compile(r"(.*_)?lrs?(\[\d+\])*")  # lr, base_lrs[0], _last_lr[1], ...
_LOW = {"last_epoch": -1.0}  # lower bounds other than 0
_FREE = ("best", "mode_worse")  # metrics, not bounded by anything
_NOT_TRIED = ("LBFGS", "SparseAdam")  # they want a closure, or sparse gradients
_OUTSIDE = ("params", "param_names")  # members of a group that are no options


# -- parameter groups ----------------------------------------------------------------------------


def travelling_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The hyperparameters of each group, without the options that belong to the object, such as its state format."""
    left = {*_OUTSIDE, *getattr(optimizer, "kept_options", ())}
    return [{key: value for key, value in group.items() if key not in left} for group in optimizer.param_groups]


def check_options(optimizer: torch.optim.Optimizer, groups: list[Any], *, complete: bool) -> None:
    """ValueError or TypeError unless the groups of `optimizer` can go on with these options.

    complete: no number that the class has a default for may be missing.
    """
    own = getattr(optimizer, "check_loaded_options", None)
    kept = getattr(optimizer, "kept_options", ())
    for index, (given, ours) in enumerate(zip(groups, optimizer.param_groups)):
        where = f"groups[{index}]"
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise TypeError(f"{where} must be the options of a group by name, is {given!r}")
        if misplaced := [key for key in _OUTSIDE if key in given]:
            raise ValueError(f"{where}.{misplaced[0]} is no option")
        wanted = [key for key in optimizer.defaults if complete and _is_numeric(ours.get(key))]
        if missing := [key for key in dict.fromkeys(["lr", *wanted]) if key not in given]:
            raise ValueError(f"{where} lacks {missing[0]}")
        for key in given.keys() & ours.keys() - set(kept):
            _check(f"{where}.{key}", given[key], ours[key], bounded=key in optimizer.defaults)
            _check_betas(f"{where}.{key}", given[key])
        if own is not None:
            with _placed(where):
                own(index, {key: value for key, value in given.items() if key not in kept})


def check_states(optimizer: torch.optim.Optimizer, staged: zpartition.StagedState) -> None:
    """ValueError unless the optimizer can go on with its groups as they are and what is staged.

    A class of torch's is asked too: it updates a small matrix with the options of each group, and needs what it
    keeps of that.
    """
    try:
        staged.check()
    except ValueError as error:
        options = "; ".join(map(_options_of, optimizer.param_groups))
        raise ValueError(f"groups with {options}: {error}") from error
    if not type(optimizer).__module__.startswith("torch.optim") or type(optimizer).__name__ in _NOT_TRIED:
        return
    needed = [_kept_of_a_matrix(optimizer, index) for index in range(len(optimizer.param_groups))]
    group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for holder, state, _ in staged.held:
        index = group_of[id(holder.tensor)]
        if missing := sorted(needed[index] - set(state)):
            raise ValueError(
                f"groups[{index}]: {type(optimizer).__name__} with {_options_of(optimizer.param_groups[index])} "
                f"keeps {missing[0]} of a parameter, which is not in the checkpoint"
            )


def _kept_of_a_matrix(optimizer: torch.optim.Optimizer, index: int) -> set[str]:
    group = optimizer.param_groups[index]
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    matrix = torch.nn.Parameter(torch.zeros(2, 2, device=device))
    matrix.grad = torch.zeros_like(matrix)
    options = {key: copy.deepcopy(value) for key, value in group.items() if key not in _OUTSIDE}
    taken = inspect.signature(type(optimizer)).parameters
    try:
        tried = type(optimizer)([matrix], **{key: value for key, value in options.items() if key in taken})
        tried.param_groups[0].update(options)
        tried.step()
    except Exception as error:  # whatever torch trips over
        raise ValueError(
            f"groups[{index}]: {type(optimizer).__name__} cannot step with {_options_of(group)}: {error}"
        ) from error
    return set(tried.state[matrix])


def _options_of(group: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in group.items() if key not in _OUTSIDE)


def set_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
    """Put `options`, one dict for each group, in the place of what is there."""
    kept = getattr(optimizer, "kept_options", ())
    for group, values in zip(optimizer.param_groups, options):
        for key, value in values.items():
            if key not in kept:
                set_option(group, key, value)


def set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Into the tensor that is there (a captured graph may hold it), as a number where one is, else in its place."""
    ours = group.get(key)
    if isinstance(ours, torch.Tensor):
        ours.copy_(torch.as_tensor(value))
    else:
        group[key] = value.item() if isinstance(value, torch.Tensor) and _is_number(ours) else value


@contextmanager
def options_put_back(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Whatever happens inside to the options of the groups, afterwards they are as they were."""
    groups = [] if optimizer is None else optimizer.param_groups
    before = [(dict(group), {k: copy.deepcopy(v) for k, v in group.items() if k not in _OUTSIDE}) for group in groups]
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
    """Return what loads `state` into a schedule, which is as it was; an error of any kind if it does not fit."""
    if (own := getattr(schedule, "prepare_load", None)) is not None:
        prepared: Callable[[], None] = own(state)
        return prepared
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise TypeError(f"must be the values of a schedule by name, is {state!r}")
    ours = schedule.state_dict()
    is_torchs = type(schedule).__module__.startswith("torch.optim")
    for key in state.keys() - ours.keys():
        is_flag = key.startswith("_") and isinstance(state[key], (bool, type(None)))  # of another version of torch
        if hasattr(schedule, key) or (is_torchs and not is_flag):
            raise ValueError(f"{key} is no value that a {type(schedule).__name__} saves")
    if is_torchs:
        _check("", state, ours, bounded=True)
    with options_put_back(optimizer):
        return rehearsed(schedule, state, lambda: _check_rates(schedule, optimizer))


def _check_rates(schedule: Any, optimizer: torch.optim.Optimizer | None) -> None:
    """ValueError unless a schedule that tells its rates tells one for each group, as does one that computes them."""
    if optimizer is None:
        return
    told = [schedule.get_last_lr()] if hasattr(schedule, "get_last_lr") else []
    for rates in [*told, *_computed(schedule)]:
        if not isinstance(rates, (list, tuple)) or len(rates) != len(optimizer.param_groups):
            raise ValueError(f"gives the rates {rates!r} for {len(optimizer.param_groups)} parameter groups")
        for index, rate in enumerate(rates):
            _check(f"lrs[{index}]", rate, 0.0, bounded=True)


def _computed(schedule: Any) -> Iterator[Any]:
    """The rates that a schedule of torch's, or those that it is made of, find where they are."""
    for part in getattr(schedule, "_schedulers", ()):
        yield from _computed(part)
    if not type(schedule).__module__.startswith("torch.optim"):
        return
    with warnings.catch_warnings(), suppress(NotImplementedError):
        warnings.simplefilter("ignore")  # torch wants it to be called in a step
        yield schedule.get_lr()


# -- values --------------------------------------------------------------------------------------


def _check(where: str, saved: Any, ours: Any, *, bounded: bool) -> None:
    """ValueError or TypeError, with the place, unless `saved` is such a thing as `ours`.

    bounded: numbers are finite, and not negative where ours is not.
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
        if not where.endswith("]"):  # of several values any may be left out
            raise TypeError(f"{where} must be None, True or False, is {saved!r}")
        _check_number(where, saved, 0.0, bounded)


def _check_mapping(where: str, saved: Any, ours: Mapping[Any, Any], bounded: bool) -> None:
    if not isinstance(saved, Mapping):
        raise TypeError(f"{where} must be values by name, is {saved!r}")
    if not all(isinstance(key, str) for key in ours):  # a table, such as milestones and how often each counts
        for number in [*saved, *saved.values()]:
            _check_number(where, number, 0, bounded)
        return
    dot = f"{where}." if where else ""
    for key, value in ours.items():
        if key in saved:
            _check(dot + key, saved[key], value, bounded=bounded)
        elif not (key.startswith("_") and isinstance(value, bool)):  # flags, which come and go with torch's versions
            raise ValueError(f"{dot}{key} is missing")


def _check_number(where: str, saved: Any, ours: Any, bounded: bool) -> None:
    name = where.rpartition(".")[2]
    if not _is_number(saved) or (isinstance(saved, torch.Tensor) and not _stands_for(saved, ours)):
        raise TypeError(f"{where} must be a number, is {saved!r}")
    low, high = -math.inf, math.inf
    if (bounded and name not in _FREE) or _RATE.fullmatch(name):
        low = _LOW.get(name, 0.0) if ours >= 0 else -sys.float_info.max
        high = _most(ours) if not isinstance(saved, int) else _MOST_COUNTED
    if not low <= saved <= high:  # NaN neither
        raise ValueError(f"{where} must be a number from {low:g} to {high:g}, is {saved!r}")


def _stands_for(saved: torch.Tensor, ours: Any) -> bool:
    """Return whether a tensor may be kept in place of a number: one of the same shape, or of none for a plain one."""
    if isinstance(ours, torch.Tensor):
        return saved.shape == ours.shape and saved.is_floating_point() == ours.is_floating_point()
    return saved.shape == () and saved.is_floating_point()


def _most(ours: Any) -> float:
    """The greatest number that may stand where `ours` does."""
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
def _placed(where: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
