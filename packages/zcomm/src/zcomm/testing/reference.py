"""References to functions, by file and qualified name, for transfer to another process.

Pickle sends a function as `module.qualname` and imports the module there.  Under pytest's `--import-mode=importlib`
the module's name is made up, so that import fails.  A reference carries the file path too: a rank imports installed
packages by name and loads every other file by path, under its name in the test process, so that classes of that file
pickle in both directions.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import attrs


@attrs.frozen
class FunctionRef:
    """Location of a module-level function."""

    path: str  # absolute path of the source file
    module: str  # name of its module in the sending process; "__main__" travels as "__mp_main__"
    qualname: str  # "function" or "Class.function"


def make_reference(fn: Callable[..., Any]) -> FunctionRef:
    """Return the reference of `fn`.  Raises TypeError for objects that another process cannot find."""
    name = getattr(fn, "__qualname__", repr(fn))
    if not inspect.isfunction(fn):
        raise TypeError(
            f"run_ranks takes a module-level function, got {name} ({type(fn).__name__}). "
            "Pass the function itself and its arguments after the world size."
        )
    if "<" in name:
        kind = "a lambda" if "<lambda>" in name else "defined inside another function"
        raise TypeError(
            f"run_ranks cannot send {name}: it is {kind}, and a rank process finds functions by file and name. "
            "Move it to the top level of its module and pass what it captured as arguments."
        )
    module = sys.modules.get(fn.__module__)
    path = getattr(module, "__file__", None) or inspect.unwrap(fn).__code__.co_filename
    if not os.path.isfile(path):
        raise TypeError(f"run_ranks cannot send {name}: it was not defined in a file ({path}).")
    shown = "__mp_main__" if fn.__module__ == "__main__" else fn.__module__
    return FunctionRef(os.path.abspath(path), shown, name)


_loaded: dict[str, int] = {}  # path -> mtime_ns of the source that sys.modules holds


def resolve(ref: FunctionRef) -> Callable[..., Any]:
    """Find the function in this process.  Raises the errors of importing its file, and LookupError if it is gone."""
    found: Any = importlib.import_module(ref.module) if _is_installed(ref) else _load(ref)
    for part in ref.qualname.split("."):
        if not hasattr(found, part):
            raise LookupError(f"{ref.path} defines no {ref.qualname} at its top level (in a rank process).")
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def _is_installed(ref: FunctionRef) -> bool:
    """True if the module belongs to a regular package that this process can import, from the same file."""
    root, _, rest = ref.module.partition(".")
    try:
        spec = importlib.util.find_spec(ref.module) if rest else None
        package = importlib.util.find_spec(root)
    except (ImportError, ValueError, AttributeError):
        return False
    if spec is None or spec.origin is None or package is None or package.origin is None:
        return False
    return os.path.exists(spec.origin) and os.path.samefile(spec.origin, ref.path)


def _load(ref: FunctionRef) -> types.ModuleType:
    """Execute the file as module `ref.module`, unless it is loaded already and unchanged."""
    mtime_ns = os.stat(ref.path).st_mtime_ns
    if ref.module in sys.modules and _loaded.get(ref.path) == mtime_ns:
        return sys.modules[ref.module]
    spec = importlib.util.spec_from_file_location(ref.module, ref.path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{ref.path} is not Python source that can be loaded.")
    module = importlib.util.module_from_spec(spec)
    _add_parents(ref.module)
    sys.modules[ref.module] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[ref.module]
        raise
    _loaded[ref.path] = mtime_ns
    return module


def _add_parents(name: str) -> None:
    """Create missing parent modules of a made-up name: pickle imports `a` before `a.b`."""
    parts = name.split(".")[:-1]
    for end in range(1, len(parts) + 1):
        parent = ".".join(parts[:end])
        if parent not in sys.modules:
            module = types.ModuleType(parent)
            module.__path__ = []
            sys.modules[parent] = module
