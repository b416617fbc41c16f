"""How an engine's checkpoint spells what is beside its tensors, as zengine writes and reads it.

The one place that knows these keys and prefixes on this side; tests/recovery continues runs from what is written
with them, so a change there shows.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..canonical import JSON

MODEL, OPTIMIZER = "model.", "optimizer."  # prefixes of tensor names: model.<name>, optimizer.<state>.<name>
NO_RANK_STATE: dict[str, JSON] = {"rng": None, "loader": None}  # others save neither random states nor positions


def engine_objects(told: dict[str, JSON], source: dict[str, JSON]) -> dict[str, JSON]:
    """All keys that an engine looks for: those of `told`, and what a run that has not begun has."""
    return {
        "client_state": {},
        "clock": dict.fromkeys(("micro_steps", "steps", "applied_steps", "skipped_steps", "samples"), 0),
        "optimizer": None,
        "scheduler": {"kind": "ConstantRate", "state": {}},
        "scaler": {"kind": "NoScaling", "state": {}},
        "features": {},
        "plan": f"imported from {source['from']}",
        **told,
        "imported": source,
    }


def spell(value: Any, left: set[str] | None = None, where: str = "") -> JSON:
    """A value as JSON with zengine's four marks; what has no spelling becomes None, and its place goes into `left`."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"$tensor": [spell(value.item()), str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, tuple):
        return {"$tuple": [spell(item, left, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [spell(item, left, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: spell(item, left, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, dict):
        return {"$pairs": [[spell(key), spell(item, left, f"{where}[{key!r}]")] for key, item in value.items()]}
    if left is not None:
        left.add(where)
    return None
