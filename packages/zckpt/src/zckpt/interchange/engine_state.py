"""Encoding of an engine's state beside its tensors, as zengine writes and reads it.

This is the only module of zckpt that knows these keys and prefixes.  tests/recovery resumes runs from imported
checkpoints, so an incompatible change in zengine fails there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from typing import Any, final

import attrs
import torch
from torch import Tensor

from zckpt.format.canonical import JSON, MAX_DEPTH

MODEL, OPTIMIZER = "model.", "optimizer."  # prefixes of tensor names: model.<name>, optimizer.<state>.<name>
TIED = "tied"  # key in the objects: alias of a tied weight -> stored name, both without MODEL
_MAX_VALUES = 1_000_000
NO_RANK_STATE: dict[str, JSON] = {"rng": None, "loader": None}  # other formats hold neither


def engine_objects(values: dict[str, JSON], source: dict[str, JSON]) -> dict[str, JSON]:
    """All objects that an engine reads: `values`, and the defaults of a new run for the other keys."""
    return {
        "client_state": {},
        "clock": dict.fromkeys(("micro_steps", "steps", "applied_steps", "skipped_steps", "samples"), 0),
        "optimizer": None,
        "scheduler": {"kind": "ConstantRate", "state": {}},
        "scaler": {"kind": "NoScaling", "state": {}},
        "features": {},
        "plan": f"imported from {source['from']}",
        **values,
        "imported": source,
    }


def tied_weights(objects: Mapping[str, JSON], stored: Container[str]) -> dict[str, str]:
    """Alias of a tied weight -> name of its `stored` tensor, both with prefix; {} if the objects name none."""
    values = objects.get(TIED)
    pairs = values.items() if isinstance(values, dict) else ()
    named = {MODEL + alias: MODEL + name for alias, name in pairs if isinstance(name, str) and alias != name}
    return {alias: name for alias, name in named.items() if name in stored}


def to_json(value: Any, left: set[str] | None = None, where: str = "") -> JSON:
    """Encode a value as JSON with four of zengine's marks ($float, $tensor, $tuple, $pairs).

    A value without an encoding becomes None, and its location is added to `left`.  So do values nested too deeply,
    and values after the first million (a small pickle can hold 2**60 values by sharing).
    """
    return _JsonEncoder(set() if left is None else left).to_json(value, where, MAX_DEPTH // 2)


@final
@attrs.define(eq=False)
class _JsonEncoder:
    left: set[str]
    budget: int = _MAX_VALUES

    def to_json(self, value: Any, where: str, depth: int) -> JSON:
        self.budget -= 1
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": str(value)}
        if isinstance(value, Tensor) and value.numel() == 1:
            number = self.to_json(value.item(), where, depth)
            return {"$tensor": [number, str(value.dtype).removeprefix("torch."), list(value.shape)]}
        if depth > 0 and self.budget > 0:
            if isinstance(value, tuple):
                return {"$tuple": self.items(value, where, depth - 1)}
            if isinstance(value, list):
                return self.items(value, where, depth - 1)
            if isinstance(value, dict):
                return self.pairs(value, where, depth - 1)
        self.left.add(where[:200])
        return None

    def items(self, values: Any, where: str, depth: int) -> JSON:
        return [self.to_json(item, f"{where}[{i}]", depth) for i, item in enumerate(values)]

    def pairs(self, values: dict[Any, Any], where: str, depth: int) -> JSON:
        if all(isinstance(key, str) and not key.startswith("$") for key in values):
            return {key: self.to_json(item, f"{where}.{key}"[-400:], depth) for key, item in values.items()}
        made = [[self.to_json(k, where, depth), self.to_json(v, f"{where}[{k!r}]", depth)] for k, v in values.items()]
        return {"$pairs": made}


def from_json(value: JSON, stored: Callable[[str], Tensor] | None = None) -> Any:
    """Decode what `to_json` or zengine encoded; a path becomes a str, and a device its name.

    stored: returns a tensor that is stored beside the JSON, by name; None: there are none.

    Raises ValueError for marks that neither writes.
    """
    if isinstance(value, list):
        return [from_json(each, stored) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((mark, content),) = value.items()
        if mark.startswith("$"):
            if mark not in _DECODERS or not isinstance(content, _DECODERS[mark][0]):
                raise ValueError(f"{mark} is no mark of a checkpoint, or it marks a {type(content).__name__}")
            return _DECODERS[mark][1](content, stored)
    return {key: from_json(each, stored) for key, each in value.items()}


_Stored = Callable[[str], Tensor] | None


def _decode_tensor(content: Any, stored: _Stored) -> Tensor:
    number, dtype, shape = content
    return torch.tensor(from_json(number), dtype=_dtype(dtype)).reshape(shape)


def _decode_stored(content: Any, stored: _Stored) -> Tensor:
    if stored is None:
        raise ValueError(f"the tensor {content[0]!r} is stored elsewhere")
    return stored(str(content[0]))


def _dtype(name: object) -> torch.dtype:
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"this torch has no dtype {name!r}")
    return found


# Mark -> the type of what it marks, and its decoder.
_DECODERS: dict[str, tuple[type, Callable[[Any, _Stored], Any]]] = {
    "$float": (str, lambda content, stored: float(content)),
    "$tuple": (list, lambda content, stored: tuple(from_json(each, stored) for each in content)),
    "$pairs": (
        list,
        lambda content, stored: {_key(from_json(key, stored)): from_json(each, stored) for key, each in content},
    ),
    "$tensor": (list, _decode_tensor),
    "$stored": (list, _decode_stored),
    "$path": (str, lambda content, stored: content),
    "$dtype": (str, lambda content, stored: _dtype(content)),
    "$device": (str, lambda content, stored: content),
}
MARKS = frozenset(_DECODERS)


def _key(value: Any) -> Any:
    if isinstance(value, (dict, list, Tensor)):
        raise ValueError(f"a {type(value).__name__} is no key of a dict")
    return value
