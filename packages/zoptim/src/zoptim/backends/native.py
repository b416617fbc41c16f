"""The compiled extension: loading, threads, instruction set.

Problem: importing zoptim must stay cheap, a machine without the extension must still train, and results must not
depend on the processor or the number of threads.  Design:

* The first use of a kernel loads the extension.  If that fails, `reason_without` returns the reason, and the
  optimizers use their torch path.
* One wheel has the kernels for all instruction sets; the best one for this processor is used.  All give the same
  bits, so the environment variable ZOPTIM_KERNELS, which forces one, changes only the speed.
* The threads are those of torch's OpenMP pool: the address of its `GOMP_parallel` is looked up in the process and
  passed to C.  A second pool would compete with torch's for the cores.
* In a checkout, an extension that is older than its sources raises: C structs and Python must match.  Installed
  wheels are not checked.

Rejected: loading at import (a broken extension would break `import zoptim`), building at first use (needs a compiler
on every node, and ranks would race), linking OpenMP (the pool would depend on the import order).
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch

from zoptim.backends.probe import find_places
from zoptim.backends.sources import source_hash
from zoptim.errors import did_you_mean

__all__ = ["Library", "Reader", "library", "num_threads", "reason_without", "use_level"]

VARIABLE = "ZOPTIM_KERNELS"
LEVELS = ("avx512", "avx2", "sse2", "neon", "portable")  # of all platforms; rt.c has those of its own
OFF = "none"  # no extension
OMP_FUNCTIONS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
POOL, CALLER = "torch's OpenMP pool", "calling thread"
PACKAGE = Path(__file__).resolve().parents[1]

_switched_off = ""  # the reason why `use_level` hides a loaded extension


class Reader(enum.Enum):
    """The extension's view of tensor objects, see watch.py."""

    NONE = "none"  # Python asks for addresses
    OBJECTS = "objects"  # through DLPack
    WORDS = "words"  # and by the words of memory that change with them


@attrs.frozen(eq=False)
class Library:
    """The loaded extension.  The level in use is global to the process."""

    ffi: Any
    lib: Any
    levels: tuple[str, ...]  # the instruction sets that run here, slowest first; C numbers them in this order
    threads: str  # POOL or CALLER
    reader: Reader

    def level(self) -> str:
        """Return the instruction set in use."""
        return self.levels[int(self.lib.zk_get_level())]

    def set_level(self, name: str) -> None:
        """Use the kernels of a level.  Raises `ValueError` for one that does not run here."""
        if name not in self.levels:
            allowed = ", ".join([*self.levels, OFF])
            raise ValueError(f"This processor does not run zoptim's {name} kernels. Allowed: {allowed}.")
        self.lib.zk_set_level(self.levels.index(name))


def library() -> Library | None:
    """Return the extension, loaded on the first call; None if it cannot be used.  Raises as `kernels` does."""
    found = _load()
    return None if _switched_off or isinstance(found, str) else found


def reason_without() -> str | None:
    """Return the reason why the extension cannot be used; None if it can.  Raises as `kernels` does."""
    found = _load()
    return found if isinstance(found, str) else _switched_off or None


def num_threads() -> int:
    """Return the number of threads of a kernel: torch's."""
    return torch.get_num_threads()


@contextlib.contextmanager
def use_level(name: str) -> Iterator[None]:
    """Use the kernels of one level, or "none", within the block.  For tests: it affects all threads of the process.

    Raises `ValueError` for a level that does not run here.
    """
    global _switched_off
    _check_name(name)
    found, before = _load(), _switched_off
    if isinstance(found, str) and name != OFF:
        raise ValueError(f"zoptim's {name} kernels cannot be used: {found}.")
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
    """Load the extension at the level of ZOPTIM_KERNELS; return it, or the reason why it cannot be used."""
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
            raise ValueError(f"{VARIABLE}={choice} cannot be used: {reason}.") from error
        return reason
    ffi, lib = module.ffi, module.lib
    _check_current(ffi.string(lib.zk_source_hash()).decode())
    names = [ffi.string(lib.zk_level_name(level)).decode() for level in range(lib.zk_levels())]
    runs = tuple(name for level, name in enumerate(names) if lib.zk_level_runs_here(level))
    omp = _omp_addresses()
    lib.zk_set_omp(*omp)
    found = Library(ffi, lib, runs, POOL if all(omp) else CALLER, _choose_reader(ffi, lib))
    found.set_level(choice or runs[lib.zk_best_level()])
    return found


def _check_name(name: str, prefix: str = "") -> None:
    if name not in (*LEVELS, OFF):
        hint = did_you_mean(name, [*LEVELS, OFF])
        raise ValueError(f"{prefix}{name} names no kernels of zoptim.{hint} Allowed: {', '.join([*LEVELS, OFF])}.")


def _explain(error: ImportError) -> str:
    if error.name == "zoptim._kernels":
        remedy = (
            "run python3 tools/dev.py build" if _checkout() else "reinstall zoptim from a wheel for this platform"
        )
        return f"the extension zoptim._kernels is not built ({remedy})"
    return f"the extension zoptim._kernels does not load ({error})"


def _omp_addresses() -> tuple[int, int, int]:
    """Return the addresses of the functions of torch's OpenMP runtime; zeros if it is not GNU's."""
    try:
        process = ctypes.CDLL(None)  # torch loads its OpenMP runtime with global symbols
        found = [ctypes.cast(getattr(process, name), ctypes.c_void_p).value or 0 for name in OMP_FUNCTIONS]
    except (AttributeError, OSError, TypeError):  # no such function, or no such look-up on this platform
        return 0, 0, 0
    return found[0], found[1], found[2]


def _choose_reader(ffi: Any, lib: Any) -> Reader:
    """Tell the extension how to view tensor objects of this torch."""
    if not lib.zk_use_exchange(_exchange_address(), id(torch.Tensor)):
        return Reader.NONE
    places = find_places()
    if places is None:
        return Reader.OBJECTS
    lib.zk_use_places(ffi.new("zk_places *", places))
    return Reader.WORDS


def _exchange_address() -> int:
    """Return the address of DLPack's C exchange API for torch's tensors; 0 if this torch has none."""
    table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if table is None:
        return 0
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    try:
        return int(pointer(table, b"dlpack_exchange_api") or 0)
    except ValueError:  # a capsule of another kind
        return 0


def _checkout() -> Path | None:
    """Return the folder of the extension's sources; None for an installed wheel."""
    folder = PACKAGE.parent.parent
    is_checkout = (folder / "hatch_build.py").is_file() and (folder / "pyproject.toml").is_file()
    return folder if is_checkout else None


def _check_current(built_from: str) -> None:
    folder = _checkout()
    if folder is not None and built_from != source_hash(folder):
        raise ImportError(
            f"The extension zoptim._kernels was built from other sources than those in {folder}. "
            "Run python3 tools/dev.py build."
        )
