"""Python values to JSON and back, exactly: what schedules, optimizers and callers keep beside tensors.

JSON has no tuples, no integer keys, no infinities and no tensors; torch's schedulers and optimizers have all four.
Each becomes an object with one reserved key.  Everything else is refused by name rather than pickled.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

_TUPLE, _PAIRS, _FLOAT, _TENSOR = "$tuple", "$pairs", "$float", "$tensor"
_RESERVED = frozenset({_TUPLE, _PAIRS, _FLOAT, _TENSOR})


def encode(value: Any, where: str = "value") -> Any:
    """`value` as JSON.

    Raises:
        TypeError: something that JSON cannot say; names it and where it is.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: str(value)}
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {_TENSOR: [encode(value.item(), where), str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, tuple):
        return {_TUPLE: [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, (list, collections.deque)):
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _encode_mapping(value, where)
    raise TypeError(
        f"{where} is a {type(value).__name__}: a checkpoint holds numbers, strings, booleans, None, lists, tuples, "
        "dicts and scalar tensors; no other objects, since reading those back would have to run code"
    )


def decode(value: Any, where: str = "value") -> Any:
    """The inverse of `encode`; lists stay lists.

    Raises:
        ValueError: a reserved key beside what `encode` never puts there; says where.
    """
    if isinstance(value, list):
        return [decode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    for mark in _RESERVED.intersection(value):
        try:
            return _DECODERS[mark](value[mark], where)
        except (TypeError, ValueError, KeyError, OverflowError, RuntimeError) as error:  # torch's, of a shape
            known = isinstance(error, _Undecodable)
            raise error if known else _Undecodable(f"{where} is no {mark} as it is saved: {error}") from None
    return {key: decode(item, f"{where}.{key}") for key, item in value.items()}


class _Undecodable(ValueError):
    """It says where already."""


def _decode_tuple(items: list[Any], where: str) -> tuple[Any, ...]:
    return tuple(decode(_checked(items, list), where))


def _decode_pairs(items: list[Any], where: str) -> dict[Any, Any]:
    pairs = [(decode(key, where), item) for key, item in _checked(items, list)]
    return {key: decode(item, f"{where}[{key!r}]") for key, item in pairs}


def _decode_float(text: str, where: str) -> float:
    return float(_checked(text, str))


def _decode_tensor(told: list[Any], where: str) -> torch.Tensor:
    number, dtype, shape = _checked(told, list)
    if any(size != 1 for size in shape):
        raise ValueError(f"a checkpoint gives one number the shape {shape}")
    return torch.full(tuple(shape), decode(number, where), dtype=_dtype(dtype))


_DECODERS: dict[str, Callable[[Any, str], Any]] = {
    _TUPLE: _decode_tuple,
    _PAIRS: _decode_pairs,
    _FLOAT: _decode_float,
    _TENSOR: _decode_tensor,
}


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"a {kind.__name__} is needed, not {value!r}")
    return value


def _encode_mapping(value: Mapping[Any, Any], where: str) -> Any:
    if all(isinstance(key, str) for key in value) and not _RESERVED.intersection(value):
        return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
    return {_PAIRS: [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]}


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, _checked(name, str), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a checkpoint names the dtype {name!r}, which this torch does not have")
    return dtype
