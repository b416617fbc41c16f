"""Validation of user input: attrs validators of fields and readers of state dicts.

Every message carries three things: the given value with its owner and field, the allowed values, and the fix.  The
validators are plain functions of attrs' form `(instance, field, value)`, so a rule reads as a list of its limits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch

FLOAT32_MAX = torch.finfo(torch.float32).max
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def as_float32(value: float) -> float:
    """Round to the nearest float32 (infinite beyond its range); return a Python float."""
    return ctypes.c_float(value).value


def is_number(value: object) -> bool:
    """True for an int or a float, but not for a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def positive(instance: object, field: attrs.Attribute[Any], value: float) -> None:
    """Require a finite number > 0, also once rounded to float32."""
    allowed = "a number > 0 within the range of float32"
    if not is_number(value):
        raise TypeError(_message(instance, field, value, allowed))
    if not 0.0 < as_float32(value) <= FLOAT32_MAX:
        raise ValueError(_message(instance, field, value, allowed))


def above_one(instance: object, field: attrs.Attribute[Any], value: float) -> None:
    """Require a finite number > 1, also once rounded to float32."""
    allowed = "a number > 1 within the range of float32"
    if not is_number(value):
        raise TypeError(_message(instance, field, value, allowed))
    if not 1.0 < as_float32(value) <= FLOAT32_MAX:
        raise ValueError(_message(instance, field, value, allowed))


def count(instance: object, field: attrs.Attribute[Any], value: int) -> None:
    """Require an int >= 1 that an int32 counter can pass by one."""
    highest = 2**31 - 2
    allowed = f"an integer from 1 to {highest}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(_message(instance, field, value, allowed))
    if not 1 <= value <= highest:
        raise ValueError(_message(instance, field, value, allowed))


def flag(instance: object, field: attrs.Attribute[Any], value: bool) -> None:
    """Require True or False; 0 and 1 are rejected."""
    if not isinstance(value, bool):
        raise TypeError(_message(instance, field, value, "True or False"))


def floating(instance: object, field: attrs.Attribute[Any], value: torch.dtype) -> None:
    """Require a dtype of `FLOATING`, those of weights and gradients."""
    allowed = "one of " + ", ".join(str(dtype) for dtype in FLOATING)
    if not isinstance(value, torch.dtype):
        raise TypeError(_message(instance, field, value, allowed))
    if value not in FLOATING:
        raise ValueError(_message(instance, field, value, allowed))


def _message(instance: object, field: attrs.Attribute[Any], value: object, allowed: str) -> str:
    plain_default = field.default is not attrs.NOTHING and not callable(getattr(field.default, "factory", None))
    default = f"; the default is {field.default!r}" if plain_default else ""
    return (
        f"{type(instance).__name__}({field.name}={value!r}): {field.name} must be {allowed},"
        f" got a {type(value).__name__}{default}"
    )


def check_keys(owner: object, state: Mapping[str, object], keys: Iterable[str]) -> None:
    """Raise TypeError or ValueError unless `state` is a mapping with exactly `keys`; name the difference."""
    name = type(owner).__name__
    if not isinstance(state, Mapping):
        raise TypeError(f"{name}.load_state_dict got a {type(state).__name__}; pass the result of state_dict()")
    expected = set(keys)
    missing, unknown = sorted(expected - set(state)), sorted(str(key) for key in set(state) - expected)
    if missing or unknown:
        raise ValueError(
            f"{name} cannot load this state: missing {missing}, unknown {unknown}; it needs exactly"
            f" {sorted(expected)}. A state saved by another kind of scaler cannot be loaded; omit it"
        )


def read_number(owner: object, state: Mapping[str, float | int], key: str, *, low: float, high: float) -> float:
    """Return `state[key]`, a number in [low, high].  Raises TypeError or ValueError with owner, key and limits."""
    value = state[key]
    if not is_number(value):
        raise TypeError(f"{type(owner).__name__}: state {key}={value!r} must be a number, as in state_dict()")
    if not low <= value <= high:
        raise ValueError(
            f"{type(owner).__name__}: state {key}={value!r} is outside {low}..{high}, the range of its rule;"
            " load it under the rule it was saved with, or omit it"
        )
    return value


def read_count(owner: object, state: Mapping[str, float | int], key: str, *, low: int, high: int) -> int:
    """Return `state[key]`, an int in [low, high].  Errors as of `read_number`."""
    value = read_number(owner, state, key, low=low, high=high)
    if not isinstance(value, int):
        raise TypeError(f"{type(owner).__name__}: state {key}={value!r} must be an int, as in state_dict()")
    return value
