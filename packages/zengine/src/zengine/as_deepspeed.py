"""`import deepspeed` as `zengine.deepspeed`, for scripts and libraries that cannot be edited.

    torchrun --nproc-per-node 2 -m zengine.as_deepspeed train.py --deepspeed_config ds.json
    python -m zengine.as_deepspeed -m my.package.train ...

or, in notebooks and tests, before any library looks for DeepSpeed:

    import zengine.as_deepspeed
    zengine.as_deepspeed.install()

Problem.  Transformers and Accelerate do more than import: they check if a module `deepspeed` can be found, and if a
distribution of that name has a version.  Both must exist, but only in processes that ask for them.

Design.  One finder at the front of `sys.meta_path` answers both questions: `deepspeed.x.y` *is* the module
`zengine.deepspeed.x.y` (the same object under two names, so its classes are identical), and the distribution
`deepspeed` has the version whose interface we implement.  Nothing is written to disk; `uninstall` removes everything.
Processes that are started as `deepspeed` (Accelerate does so for several hosts) get our launcher: its folder comes
first in PATH, and ZENGINE_PYTHON names this interpreter.

Rejected: a distribution named deepspeed on the package index (it would shadow the real one for other users), and
a folder put on sys.path (a second copy of every class).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import runpy
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, final

__all__ = ["API_VERSION", "install", "main", "uninstall"]

API_VERSION = "0.19.8"  # of DeepSpeed, whose names zengine.deepspeed has

_NAME = "deepspeed"
_REAL = "zengine.deepspeed"
# Modules that look for DeepSpeed once, when they are imported.
_LOOK_ONCE = ("transformers.integrations.deepspeed", "accelerate.utils")

_COMMANDS = str(Path(__file__).parent / "deepspeed/bin")  # the command `deepspeed`
_PYTHON = "ZENGINE_PYTHON"  # the interpreter that it runs

_USAGE = "usage: python -m zengine.as_deepspeed [-m MODULE | SCRIPT] [ARGUMENTS ...]"


@final
class _SameModule(importlib.abc.Loader):
    """Loads the module that exists under its own name."""

    def __init__(self, real: str) -> None:
        self.real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.real)
        self.own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.own_spec  # the import system has just stored the alias there


@final
class _Metadata(importlib.metadata.Distribution):
    """Distribution `deepspeed`: name and version."""

    def read_text(self, filename: str) -> str | None:
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: {API_VERSION}\n"
            "Summary: zengine, under the name of DeepSpeed (zengine.as_deepspeed)\n",
            "top_level.txt": f"{_NAME}\n",
        }
        return texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


@final
class _Finder(importlib.metadata.DistributionFinder):
    """Finds `deepspeed`, its submodules and its metadata."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _NAME and not fullname.startswith(f"{_NAME}."):
            return None
        real = f"zengine.{fullname}"
        found = importlib.util.find_spec(real)
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, _SameModule(real), origin=found.origin, is_package=is_package)

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        name = None if context is None else context.name
        return [_Metadata()] if name is None or name.lower() == _NAME else []


def install() -> None:
    """Make `import deepspeed` mean `zengine.deepspeed` in this process, until `uninstall`.  Idempotent.

    Raises:
        ImportError: the real DeepSpeed is imported, or a library has already looked for DeepSpeed and found none.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    loaded = sys.modules.get(_NAME)
    if loaded is not None and loaded.__name__ != _REAL:
        raise ImportError(
            f"deepspeed is imported already, from {getattr(loaded, '__file__', 'nowhere')}: call "
            "zengine.as_deepspeed.install() before the first `import deepspeed`."
        )
    early = [name for name in _LOOK_ONCE if name in sys.modules and importlib.util.find_spec(_NAME) is None]
    if early:
        raise ImportError(
            f"{early[0]} is imported already, looked for deepspeed and found none: call "
            "zengine.as_deepspeed.install() before importing transformers or accelerate, or start the script with "
            "python -m zengine.as_deepspeed."
        )
    sys.meta_path.insert(0, _Finder())
    importlib.invalidate_caches()
    os.environ["PATH"] = os.pathsep.join([_COMMANDS, *_other_paths()])
    os.environ[_PYTHON] = sys.executable


def uninstall() -> None:
    """Undo `install`: remove finder, aliases and command; references to imported modules stay valid."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name in [name for name in sys.modules if name == _NAME or name.startswith(f"{_NAME}.")]:
        if sys.modules[name].__name__.startswith(_REAL):
            del sys.modules[name]
    importlib.invalidate_caches()
    if os.environ.pop(_PYTHON, None) is not None:
        os.environ["PATH"] = os.pathsep.join(_other_paths())


def _other_paths() -> list[str]:
    return [folder for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if folder != _COMMANDS]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script, or with -m a module, with `import deepspeed` as ours; its exceptions propagate."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{_USAGE}\n\nRuns SCRIPT as __main__; `import deepspeed` in it means zengine.deepspeed.")
        return 0 if arguments else 2
    as_module = arguments[0] == "-m"
    if as_module and len(arguments) < 2:
        print(f"{_USAGE}\n-m needs the name of a module.", file=sys.stderr)
        return 2
    target, rest = (arguments[1], arguments[2:]) if as_module else (arguments[0], arguments[1:])
    if not as_module and not Path(target).exists():
        print(f"{_USAGE}\nno such script: {target} (working directory: {Path.cwd()})", file=sys.stderr)
        return 2
    install()
    sys.argv = [target, *rest]
    try:
        if as_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(target).resolve().parent))
            runpy.run_path(target, run_name="__main__")
    except ModuleNotFoundError as error:
        if str(error.name).startswith(f"{_NAME}."):
            print(f"zengine.as_deepspeed: {_REAL} has no part {error.name!r}; see DEEPSPEED.md", file=sys.stderr)
        raise
    return 0


if __name__ == "__main__":
    # This file runs a second time under its real name, so that install() in the script meets the same finder.
    raise SystemExit(importlib.import_module("zengine.as_deepspeed").main())
