"""Lazy imports: names on first use, class tests without an import, imports without garbage collection.

`import zengine` is fast, and `initialize` of a model that is not split imports no module that splits models.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from zpartition.pipeline import PipelineModule

__all__ = ["gc_paused", "homes_below", "is_imported", "is_pipeline", "lazy_attributes", "own_version"]


def lazy_attributes(
    package: str,
    homes: Mapping[str, str],
    renamed: Mapping[str, str] = MappingProxyType({}),
    *,
    with_submodules: bool = False,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` (PEP 562) of `package`, whose public names are imported on first use.

    homes: public name -> module that defines it, or `module:name` if it has another name there.  renamed: old name ->
    path of the new one; an old name raises AttributeError (ImportError in `from package import name`) with that path.
    with_submodules: other names are those of submodules, as after `import package.name`.
    """

    def attribute(name: str) -> Any:
        if name in renamed:
            is_import = sys._getframe(1).f_code.co_name == "_handle_fromlist"  # of `from ... import name`
            error = ImportError if is_import else AttributeError
            raise error(f"{package}.{name} was renamed in 0.3.0; use {renamed[name]}.")
        if name in homes:
            module, _, other_name = homes[name].partition(":")
            found = getattr(importlib.import_module(module), other_name or name)
        elif with_submodules and _is_module(f"{package}.{name}"):
            found = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, found)
        return found

    def names() -> list[str]:
        imported = vars(sys.modules[package])
        return sorted({*imported, *imported["__all__"]})

    return attribute, names


def homes_below(package: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return the `homes` of `lazy_attributes` from submodules of `package`: submodule -> its names, with spaces."""
    return {name: f"{package}.{module}" for module, some in names.items() for name in some.split()}


def _is_module(path: str) -> bool:
    """Return whether a file defines the module `path`, whose package is imported; special names are none."""
    found = None if path.rpartition(".")[2].startswith("__") else importlib.util.find_spec(path)
    return found is not None and found.origin is not None  # a folder without an `__init__.py` has no origin


def is_imported(module: str) -> bool:
    """Return True if `module` is imported; until then no object is an instance of its classes."""
    return module in sys.modules


def is_pipeline(model: object) -> TypeGuard[PipelineModule]:
    """Return True if `model` holds layers of a pipeline; imports no pipelines for other models."""
    if not is_imported("zpartition.pipeline"):
        return False
    from zpartition.pipeline import PipelineModule

    return isinstance(model, PipelineModule)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable Python's garbage collector inside, for imports; restore it afterwards.

    Imports make many objects that stay alive, so the collector runs dozens of times, traverses all of torch each
    time and frees little: a fifth of the time of our imports.  It runs once at the end, over the new objects alone:
    classes that attrs replaces by others with slots are 2 MB.  Freezing and unfreezing moves the new objects to the
    oldest generation, as that many collections would, without traversing them.  It is left out if nothing was
    imported: with a million frozen objects the question takes 50 ms.
    """
    was_on, imported = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if was_on and len(sys.modules) > imported:
            gc.collect(0)
        if len(sys.modules) > imported and gc.get_freeze_count() == 0:  # otherwise a caller keeps some objects frozen
            gc.freeze()
            gc.unfreeze()
        if was_on:
            gc.enable()


def own_version() -> str:
    """Return `zengine.__version__` without an import: the package is loaded before its modules."""
    return str(vars(sys.modules[__package__])["__version__"])
