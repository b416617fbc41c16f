"""`deepspeed.utils.module_utils`: submodules by dotted name."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["recursive_getattr", "recursive_setattr"]


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """Return the submodule or attribute of a dotted name.  Raises AttributeError if there is none."""
    found: Any = model
    for name in module_name.split("."):
        found = getattr(found, name)
    return found


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Replace the submodule or attribute of a dotted name."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)
