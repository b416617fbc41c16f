"""Exact JSON encoding of the small state of schedules, optimizers and callers.

JSON has no tuples, integer keys, infinities or tensors; the state of torch's schedules and optimizers has all four.
Each becomes an object with one reserved key.  Other types raise an error that names them; nothing is pickled.
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
    """Return `value` as JSON.

    Raises:
        TypeError: a type that is not supported; names it and its place.
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
        "dicts and scalar tensors; other objects are not supported, since loading them would run code"
    )


def decode(value: Any, where: str = "value") -> Any:
    """Return the inverse of `encode`; lists stay lists.

    Raises:
        ValueError: a reserved key has a value that `encode` never writes; names its place.
    """
    if isinstance(value, list):
        return [decode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    for mark in _RESERVED.intersection(value):
        try:
            return _DECODERS[mark](value[mark], where)
        except (
            TypeError,
            ValueError,
            KeyError,
            OverflowError,
            RuntimeError,
        ) as error:  # RuntimeError: a shape in torch
            known = isinstance(error, _Undecodable)
            raise error if known else _Undecodable(f"{where} is not a valid {mark}: {error}") from None
    return {key: decode(item, f"{where}.{key}") for key, item in value.items()}


class _Undecodable(ValueError):
    """Error whose message has the place already."""


def _decode_tuple(items: list[Any], where: str) -> tuple[Any, ...]:
    return tuple(decode(_checked(items, list), where))


def _decode_pairs(items: list[Any], where: str) -> dict[Any, Any]:
    pairs = [(decode(key, where), item) for key, item in _checked(items, list)]
    return {key: decode(item, f"{where}[{key!r}]") for key, item in pairs}


def _decode_float(text: str, where: str) -> float:
    return float(_checked(text, str))


def _decode_tensor(parts: list[Any], where: str) -> torch.Tensor:
    number, dtype, shape = _checked(parts, list)
    if any(size != 1 for size in shape):
        raise ValueError(f"a tensor with one number has the shape {shape}")
    return torch.full(tuple(shape), decode(number, where), dtype=_dtype(dtype))


_DECODERS: dict[str, Callable[[Any, str], Any]] = {
    _TUPLE: _decode_tuple,
    _PAIRS: _decode_pairs,
    _FLOAT: _decode_float,
    _TENSOR: _decode_tensor,
}


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"expected a {kind.__name__}, got {value!r}")
    return value


def _encode_mapping(value: Mapping[Any, Any], where: str) -> Any:
    if all(isinstance(key, str) for key in value) and not _RESERVED.intersection(value):
        return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
    return {_PAIRS: [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]}


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, _checked(name, str), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {name!r}")
    return dtype
