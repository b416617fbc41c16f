"""The one place that touches the compiled extension: loads it, lends it torch's threads, chooses the instruction set.

Problem: importing zoptim must stay cheap, a machine without the extension must still train, and results must not
depend on which processor or how many threads ran them.  Design:

* The extension is loaded when a kernel is first asked for.  Where it cannot be, `reason_without` says why, and
  the optimizers take their torch path.
* One wheel holds the kernels for every instruction set; the best that this processor runs is used.  All give the
  same bits, so the environment variable ZOPTIM_KERNELS, which forces one, changes speed alone.
* Threads are those of torch's OpenMP pool: the address of its `GOMP_parallel` is looked up in the process and
  handed to C.  A second pool would fight with torch's for the cores.
* A checkout knows when the extension is older than its sources and refuses to run it: C structs and Python must
  agree.  An installed wheel is never questioned.

Rejected: loading at import (a broken extension would break `import zoptim`), building at first use (needs a
compiler on every node, and ranks would race), linking OpenMP (which pool one gets then depends on import order).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch

from zoptim.backends.sources import source_hash
from zoptim.errors import did_you_mean

__all__ = ["Library", "library", "num_threads", "reason_without", "use_level"]

VARIABLE = "ZOPTIM_KERNELS"
LEVELS = ("avx512", "avx2", "sse2", "neon", "portable")  # of all platforms; rt.c names those of its own
OFF = "none"  # as if there were no extension
OMP_FUNCTIONS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
POOL, CALLER = "torch's OpenMP pool", "calling thread"
PACKAGE = Path(__file__).resolve().parents[1]

_switched_off = ""  # why `use_level` hides a loaded extension


@attrs.frozen(eq=False)
class Library:
    """The loaded extension.  The level in use is a fact of the whole process."""

    ffi: Any
    lib: Any
    levels: tuple[str, ...]  # the instruction sets that run here, worst first; C numbers them in this order
    threads: str  # POOL or CALLER

    def level(self) -> str:
        """The instruction set in use."""
        return self.levels[int(self.lib.zk_get_level())]

    def set_level(self, name: str) -> None:
        """Raises `ValueError` for a level that does not run here."""
        if name not in self.levels:
            allowed = ", ".join([*self.levels, OFF])
            raise ValueError(f"This processor runs no {name} kernels of zoptim. It takes: {allowed}.")
        self.lib.zk_set_level(self.levels.index(name))


def library() -> Library | None:
    """The extension, loaded on the first call; None where there is none to use.  Raises as `kernels` does."""
    found = _load()
    return None if _switched_off or isinstance(found, str) else found


def reason_without() -> str | None:
    """Why there is no extension to use; None where there is one.  Raises as `kernels` does."""
    found = _load()
    return found if isinstance(found, str) else _switched_off or None


def num_threads() -> int:
    """How many threads a kernel may use: as many as torch does."""
    return torch.get_num_threads()


@contextlib.contextmanager
def use_level(name: str) -> Iterator[None]:
    """Within the block this process uses the kernels of one level, or "none".  For tests: other threads see it too.

    Raises `ValueError` for a level that does not run here.
    """
    global _switched_off
    _check_name(name)
    found, before = _load(), _switched_off
    if isinstance(found, str) and name != OFF:
        raise ValueError(f"The {name} kernels of zoptim cannot be used: {found}.")
    level = "" if isinstance(found, str) else found.level()
    try:
        if name != OFF and not isinstance(found, str):
            found.set_level(name)
        _switched_off = "the kernels are switched off" if name == OFF else ""
        yield
    finally:
        _switched_off = before
        if not isinstance(found, str):
            found.set_level(level)


@functools.cache
def _load() -> Library | str:
    """The extension at the level that ZOPTIM_KERNELS asks for, or why there is none."""
    choice = os.environ.get(VARIABLE, "").strip().lower()
    if choice:
        _check_name(choice, f"{VARIABLE}=")
    if choice == OFF:
        return f"{VARIABLE}={OFF} is set"
    try:
        module = importlib.import_module("zoptim._kernels")
    except ImportError as error:
        reason = _explain(error)
        if choice:
            raise ValueError(f"{VARIABLE}={choice} cannot be had: {reason}.") from error
        return reason
    ffi, lib = module.ffi, module.lib
    _check_current(ffi.string(lib.zk_source_hash()).decode())
    names = [ffi.string(lib.zk_level_name(level)).decode() for level in range(lib.zk_levels())]
    runs = tuple(name for level, name in enumerate(names) if lib.zk_level_runs_here(level))
    omp = _omp_addresses()
    lib.zk_set_omp(*omp)
    found = Library(ffi, lib, runs, POOL if all(omp) else CALLER)
    found.set_level(choice or runs[lib.zk_best_level()])
    return found


def _check_name(name: str, prefix: str = "") -> None:
    if name not in (*LEVELS, OFF):
        hint = did_you_mean(name, [*LEVELS, OFF])
        raise ValueError(f"{prefix}{name} names no kernels of zoptim.{hint} It takes: {', '.join([*LEVELS, OFF])}.")


def _explain(error: ImportError) -> str:
    if error.name == "zoptim._kernels":
        remedy = "run python3 tools/dev.py build" if _checkout() else "reinstall zoptim from a wheel of this platform"
        return f"the extension zoptim._kernels is not built ({remedy})"
    return f"the extension zoptim._kernels does not load ({error})"


def _omp_addresses() -> tuple[int, int, int]:
    """Return where torch's OpenMP runtime has its functions; zeros where it is of another kind."""
    try:
        process = ctypes.CDLL(None)  # torch loads its OpenMP runtime for all to see
        found = [ctypes.cast(getattr(process, name), ctypes.c_void_p).value or 0 for name in OMP_FUNCTIONS]
    except (AttributeError, OSError, TypeError):  # no such function, or no such look-up on this platform
        return 0, 0, 0
    return found[0], found[1], found[2]


def _checkout() -> Path | None:
    """The folder with the sources that the extension is built from, when this is no installed wheel."""
    folder = PACKAGE.parent.parent
    is_checkout = (folder / "hatch_build.py").is_file() and (folder / "pyproject.toml").is_file()
    return folder if is_checkout else None


def _check_current(built_from: str) -> None:
    folder = _checkout()
    if folder is not None and built_from != source_hash(folder):
        raise ImportError(
            f"The extension zoptim._kernels was built from other sources than those in {folder}: "
            "run python3 tools/dev.py build."
        )
