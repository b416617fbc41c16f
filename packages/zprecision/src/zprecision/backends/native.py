"""The compiled extension: loading, threads, instruction set.

Importing zprecision does not load it: the first use of a kernel does.  If that fails, `reason_without` returns the
reason, and torch is used.  All levels give the same bits, so the environment variable ZPRECISION_KERNELS, which
forces one, changes only the speed.  Threads are those of torch's OpenMP pool, whose address is looked up in the
process.  In a checkout, an extension that is older than its sources raises: C structs and Python must match.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch

from zprecision._compat import has_plain_memory
from zprecision.backends.gpu import launch
from zprecision.backends.sources import source_hash

__all__ = ["Kernels", "Library", "is_addressable", "kernels", "library", "reason_without", "use_level"]

VARIABLE = "ZPRECISION_KERNELS"
LEVELS = (
    "avx512vnni",
    "avx512",
    "avx2",
    "sse2",
    "neon",
    "portable",
)  # of all platforms; zq_rt.c has those of its own
OFF = "none"  # no extension
_VARIABLE_REASON = f"{VARIABLE}={OFF} is set"
OMP_FUNCTIONS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
POOL, CALLER = "torch's OpenMP pool", "calling thread"
PACKAGE = Path(__file__).resolve().parents[1]

_switched_off = ""  # the reason why `use_level` hides a loaded extension


@attrs.frozen(eq=False)
class Library:
    """The loaded extension.  The level in use is global to the process."""

    ffi: Any
    lib: Any
    levels: tuple[str, ...]  # the instruction sets that run here, slowest first; C numbers them in this order
    threads: str  # POOL or CALLER

    def level(self) -> str:
        """Return the instruction set in use."""
        return self.levels[int(self.lib.zq_get_level())]

    def set_level(self, name: str) -> None:
        """Use the kernels of a level.  Raises `ValueError` for one that does not run here."""
        if name not in self.levels:
            allowed = ", ".join([*self.levels, OFF])
            raise ValueError(f"This processor does not run zprecision's {name} kernels. Allowed: {allowed}.")
        self.lib.zq_set_level(self.levels.index(name))


@attrs.frozen(kw_only=True)
class Kernels:
    """The kernels in use in this process."""

    cpu: str  # the instruction set in use, or the reason for the torch path
    levels: tuple[str, ...]  # available instruction sets, slowest first; () without the extension
    threads: str  # the thread pool of the CPU kernels
    gpu: str  # the CuPy in use, or the reason for the torch path


def kernels() -> Kernels:
    """Return the kernels in use, and the reason if there are none.

    Raises `ValueError` if ZPRECISION_KERNELS names kernels that do not run here, and `ImportError` in a checkout
    whose extension is older than its sources.
    """
    found = _usable()
    no_gpu = launch.reason_without()
    return Kernels(
        cpu=str(reason_without()) if found is None else found.level(),
        levels=() if found is None else found.levels,
        threads=POOL if found is None else found.threads,  # torch's own operations run in its pool
        gpu=f"cupy {importlib.import_module('cupy').__version__}" if no_gpu is None else no_gpu,
    )


def library() -> Library | None:
    """Return the extension, loaded on the first call; None if it cannot be used.  Raises as `kernels` does.

    Warns once if the extension is missing although nobody switched it off: torch then serves, more slowly.
    """
    found = _load()
    if isinstance(found, str) and found != _VARIABLE_REASON:
        _warn_once(found)
    return _usable()


def _usable() -> Library | None:
    found = _load()
    return None if _switched_off or isinstance(found, str) else found


@functools.cache
def _warn_once(reason: str) -> None:
    message = f"zprecision uses torch's operations, which are slower: {reason}. ZPRECISION_KERNELS=none accepts that."
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def reason_without() -> str | None:
    """Return the reason why the extension cannot be used; None if it can.  Raises as `kernels` does."""
    found = _load()
    return found if isinstance(found, str) else _switched_off or None


def is_addressable(tensor: torch.Tensor) -> bool:
    """Return whether C may read the tensor: on a CPU, and of no class (DTensor) that may have no address."""
    return tensor.device.type == "cpu" and has_plain_memory(type(tensor))


@contextlib.contextmanager
def use_level(name: str) -> Iterator[None]:
    """Use the kernels of one level, or "none", within the block.  For tests: it affects all threads of the process.

    Raises `ValueError` for a level that does not run here.
    """
    global _switched_off
    _check_name(name)
    found, before = _load(), _switched_off
    if isinstance(found, str):
        if name != OFF:
            raise ValueError(f"zprecision's {name} kernels cannot be used: {found}.")
        yield
        return
    level = found.level()
    try:
        if name != OFF:
            found.set_level(name)
        _switched_off = "the kernels are switched off" if name == OFF else ""
        yield
    finally:
        _switched_off = before
        found.set_level(level)


@functools.cache
def _load() -> Library | str:
    """Load the extension at the level of ZPRECISION_KERNELS; return it, or the reason why it cannot be used."""
    choice = os.environ.get(VARIABLE, "").strip().lower()
    if choice:
        _check_name(choice, f"{VARIABLE}=")
    if choice == OFF:
        return _VARIABLE_REASON
    try:
        module = importlib.import_module("zprecision._kernels")
    except ImportError as error:
        reason = _explain(error)
        if choice:
            raise ValueError(f"{VARIABLE}={choice} cannot be used: {reason}.") from error
        return reason
    ffi, lib = module.ffi, module.lib
    _check_current(ffi.string(lib.zq_source_hash()).decode())
    names = [ffi.string(lib.zq_level_name(level)).decode() for level in range(lib.zq_levels())]
    runs = tuple(name for level, name in enumerate(names) if lib.zq_level_runs_here(level))
    omp = _omp_addresses()
    lib.zq_set_omp(*omp)
    found = Library(ffi, lib, runs, POOL if all(omp) else CALLER)
    found.set_level(choice or runs[lib.zq_best_level()])
    return found


def _check_name(name: str, prefix: str = "") -> None:
    if name not in (*LEVELS, OFF):
        raise ValueError(f"{prefix}{name} names no kernels of zprecision. Allowed: {', '.join([*LEVELS, OFF])}.")


def _explain(error: ImportError) -> str:
    if error.name == "zprecision._kernels":
        reinstall = "reinstall zprecision with a C compiler on PATH, or from a wheel for this platform"
        remedy = "run python3 tools/dev.py build" if _checkout() else reinstall
        return f"the extension zprecision._kernels is not built ({remedy})"
    return f"the extension zprecision._kernels does not load ({error})"


def _omp_addresses() -> tuple[int, int, int]:
    """Return the addresses of the functions of torch's OpenMP runtime; zeros if it is not GNU's."""
    try:
        process = ctypes.CDLL(None)  # torch loads its OpenMP runtime with global symbols
        found = [ctypes.cast(getattr(process, name), ctypes.c_void_p).value or 0 for name in OMP_FUNCTIONS]
    except (AttributeError, OSError, TypeError):  # no such function, or no such look-up on this platform
        return 0, 0, 0
    return found[0], found[1], found[2]


def _checkout() -> Path | None:
    """Return the folder of the extension's sources; None for an installed wheel."""
    folder = PACKAGE.parent.parent
    is_checkout = (folder / "hatch_build.py").is_file() and (folder / "pyproject.toml").is_file()
    return folder if is_checkout else None


def _check_current(built_from: str) -> None:
    folder = _checkout()
    if folder is not None and built_from != source_hash(folder):
        raise ImportError(
            f"The extension zprecision._kernels was built from other sources than those in {folder}. "
            "Run python3 tools/dev.py build."
        )


def num_threads() -> int:
    """Return the number of threads of a kernel: torch's."""
    return torch.get_num_threads()
