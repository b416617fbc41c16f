"""`deepspeed.utils.module_utils`: attributes by dotted names."""

from __future__ import annotations

import operator
from typing import Any

__all__ = ["recursive_getattr", "recursive_setattr"]


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return the attribute with this dotted name ("layers.0.weight").  Raises AttributeError."""
    return operator.attrgetter(module_name)(model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute with this dotted name; all but its last part must exist."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)
