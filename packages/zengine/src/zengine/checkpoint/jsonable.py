"""Exact JSON encoding of the small state of schedules, optimizers and callers.

JSON has no tuples, integer keys, infinities or tensors; the state of torch's schedules and optimizers has all four.
Each becomes an object with one reserved key.  So do paths, and torch's dtypes and devices, which hyperparameters
have.  Other types raise an error that names them; nothing is pickled.

Tensors of several elements do not fit into JSON.  A caller that can store them elsewhere passes a dict, which
receives them by name.
"""

from __future__ import annotations

import collections
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

_TUPLE, _PAIRS, _FLOAT, _TENSOR, _STORED = "$tuple", "$pairs", "$float", "$tensor", "$stored"
_PATH, _DTYPE, _DEVICE = "$path", "$dtype", "$device"
RESERVED = frozenset({_TUPLE, _PAIRS, _FLOAT, _TENSOR, _STORED, _PATH, _DTYPE, _DEVICE})

STORED_PREFIX = "client_state."  # of the names of tensors that are stored beside the JSON


def encode(value: Any, where: str = "value", tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """Return `value` as JSON.

    tensors: receives the tensors that do not have one element, by name; None: they raise.

    Raises:
        TypeError: a type that is not supported; names it and its place.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: str(value)}
    if isinstance(value, torch.Tensor) and (value.numel() == 1 or (tensors is not None and _is_plain(value))):
        return _encode_tensor(value, where, tensors)
    if isinstance(value, tuple):
        return {_TUPLE: [encode(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]}
    if isinstance(value, (list, collections.deque)):
        return [encode(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, tensors)
    if isinstance(value, np.generic):
        return encode(value.item(), where)
    for mark, kind in ((_PATH, pathlib.PurePath), (_DTYPE, torch.dtype), (_DEVICE, torch.device)):
        if isinstance(value, kind):
            return {mark: str(value).removeprefix("torch.")}
    allowed = "scalar tensors" if tensors is None else "tensors"
    raise TypeError(
        f"{where} is a {type(value).__name__}: a checkpoint holds numbers, strings, booleans, None, lists, tuples, "
        f"dicts, paths and {allowed}; other objects are not supported, since loading them would run code"
    )


def decode(value: Any, where: str = "value", tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """Return the inverse of `encode`; lists stay lists.

    tensors: receives the stored tensors by name, uninitialized, for the caller to fill.

    Raises:
        ValueError: a reserved key has a value that `encode` never writes; names its place.
    """
    if isinstance(value, list):
        return [decode(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    for mark in RESERVED.intersection(value):
        try:
            return _DECODERS[mark](value[mark], where, {} if tensors is None else tensors)
        except (
            TypeError,
            ValueError,
            KeyError,
            OverflowError,
            RuntimeError,
        ) as error:  # RuntimeError: a shape in torch
            known = isinstance(error, _Undecodable)
            raise error if known else _Undecodable(f"{where} is not a valid {mark}: {error}") from None
    return {key: decode(item, f"{where}.{key}", tensors) for key, item in value.items()}


class _Undecodable(ValueError):
    """Error whose message has the place already."""


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return True for a tensor that a checkpoint can store as it is: strided, and with values."""
    return tensor.layout == torch.strided and not tensor.is_meta


_Tensors = dict[str, torch.Tensor]


def _decode_tuple(items: list[Any], where: str, tensors: _Tensors) -> tuple[Any, ...]:
    return tuple(decode(_checked(items, list), where, tensors))


def _decode_pairs(items: list[Any], where: str, tensors: _Tensors) -> dict[Any, Any]:
    pairs = [(decode(key, where, tensors), item) for key, item in _checked(items, list)]
    return {key: decode(item, f"{where}[{key!r}]", tensors) for key, item in pairs}


def _decode_float(text: str, where: str, _tensors: _Tensors) -> float:
    return float(_checked(text, str))


def _decode_tensor(parts: list[Any], where: str, _tensors: _Tensors) -> torch.Tensor:
    number, dtype, shape = _checked(parts, list)
    if any(size != 1 for size in shape):
        raise ValueError(f"a tensor with one number has the shape {shape}")
    return torch.full(tuple(shape), decode(number, where), dtype=_dtype(dtype))


def _decode_stored(parts: list[Any], where: str, tensors: _Tensors) -> torch.Tensor:
    name, dtype, shape = _checked(parts, list)
    if not _checked(name, str).startswith(STORED_PREFIX):
        raise ValueError(f"{name!r} is not the name of a stored tensor")
    return tensors.setdefault(name, torch.empty(tuple(_checked(shape, list)), dtype=_dtype(dtype)))


_DECODERS: dict[str, Callable[[Any, str, _Tensors], Any]] = {
    _TUPLE: _decode_tuple,
    _PAIRS: _decode_pairs,
    _FLOAT: _decode_float,
    _TENSOR: _decode_tensor,
    _STORED: _decode_stored,
    _PATH: lambda text, where, tensors: pathlib.Path(_checked(text, str)),
    _DTYPE: lambda text, where, tensors: _dtype(text),
    _DEVICE: lambda text, where, tensors: torch.device(_checked(text, str)),
}


def _checked(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"expected a {kind.__name__}, got {value!r}")
    return value


def _encode_mapping(value: Mapping[Any, Any], where: str, tensors: _Tensors | None) -> Any:
    if all(isinstance(key, str) for key in value) and not RESERVED.intersection(value):
        return {key: encode(item, f"{where}.{key}", tensors) for key, item in value.items()}
    pairs = value.items()
    return {_PAIRS: [[encode(key, where), encode(item, f"{where}[{key!r}]", tensors)] for key, item in pairs]}


def _encode_tensor(value: torch.Tensor, where: str, tensors: _Tensors | None) -> Any:
    dtype, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
    if value.numel() == 1 or tensors is None:
        return {_TENSOR: [encode(value.item(), where), dtype, shape]}
    name = f"{STORED_PREFIX}{len(tensors)}"
    tensors[name] = value
    return {_STORED: [name, dtype, shape]}


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, _checked(name, str), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {name!r}")
    return dtype
