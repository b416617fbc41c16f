"""Python values to JSON and back, exactly: what schedules, optimizers and callers keep beside tensors.

JSON has no tuples, no integer keys, no infinities and no tensors; torch's schedulers and optimizers have all four.
Each becomes an object with one reserved key.  Everything else is refused by name rather than pickled.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
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


def decode(value: Any) -> Any:
    """The inverse of `encode`; lists stay lists."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(decode(item) for item in value[_TUPLE])
    if _PAIRS in value:
        return {decode(key): decode(item) for key, item in value[_PAIRS]}
    if _FLOAT in value:
        return float(value[_FLOAT])
    if _TENSOR in value:
        number, dtype, shape = value[_TENSOR]
        if any(size != 1 for size in shape):
            raise ValueError(f"a checkpoint gives one number the shape {shape}")
        return torch.full(tuple(shape), decode(number), dtype=_dtype(dtype))
    return {key: decode(item) for key, item in value.items()}


def _encode_mapping(value: Mapping[Any, Any], where: str) -> Any:
    if all(isinstance(key, str) for key in value) and not _RESERVED.intersection(value):
        return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
    return {_PAIRS: [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]}


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a checkpoint names the dtype {name!r}, which this torch does not have")
    return dtype
