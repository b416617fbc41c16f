"""Imports that wait until they are needed: `initialize` of a model that is not split loads nothing that splits."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def is_imported(module: str) -> bool:
    """Whether anybody has imported `module`; until then nothing is an instance of its classes."""
    return module in sys.modules


def importing(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` (PEP 562) for `package`, whose public names live in other modules: `homes` says in which."""

    def attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return attribute
