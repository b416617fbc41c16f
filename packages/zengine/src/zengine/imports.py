"""Imports that wait until they are needed: `initialize` of a model that is not split loads nothing that splits."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any


def is_imported(module: str) -> bool:
    """Return whether anybody has imported `module`; until then nothing is an instance of its classes."""
    return module in sys.modules


def importing(
    package: str, homes: Mapping[str, str], renamed: Mapping[str, str] = MappingProxyType({})
) -> Callable[[str], Any]:
    """Return a `__getattr__` (PEP 562) for `package`, whose public names are imported on first use.

    homes: public name -> module that defines it.  renamed: old name -> path of the new one; asking for an old name
    raises AttributeError (ImportError in `from package import name`) with that path.
    """

    def attribute(name: str) -> Any:
        if name in renamed:
            is_import = sys._getframe(1).f_code.co_name == "_handle_fromlist"  # of `from ... import name`
            error = ImportError if is_import else AttributeError
            raise error(f"{package}.{name} was renamed in 0.3.0; use {renamed[name]}.")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return attribute


# Imports without Python's garbage collector.
#
# Importing makes many objects that stay, so the collector runs dozens of times, walks all of torch each time and
# finds nothing: a fifth of the time that our imports take.  What was made meanwhile then counts as old, as it would
# after as many collections: freezing and unfreezing moves it there without looking at it.


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, the collector rests; afterwards it is as it was."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # else somebody wants some objects to stay frozen
            gc.freeze()
            gc.unfreeze()
        if was_on:
            gc.enable()


def own_version() -> str:
    """Return `zengine.__version__` without an import: the package is there before any of its modules."""
    return str(vars(sys.modules[__package__])["__version__"])
