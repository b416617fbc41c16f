"""Compilation by NVRTC, and the cache of compiled kernels.

NVRTC is called directly, because CuPy adds `-ftz=true`, which flushes subnormal numbers to zero on GPUs only.
Contraction is off, so every product and sum is rounded as on a CPU.  This file is the same in every package that has
GPU kernels; a test compares the copies.

The cache is a folder of files named by a digest of text, architecture, options and compiler version.  A rename makes
a file visible, so ranks that start together at worst compile the same program twice.  If the folder is not writable,
each process compiles for itself, half a second per program.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["OPTIONS", "binary", "cache_folder", "cache_name", "compile_text", "target"]

PACKAGE = __name__.partition(".")[0]
OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")


def binary(text: str, capability: tuple[int, int]) -> bytes:
    """Return machine code (or PTX) of `text` for a compute capability, from the cache or compiled.

    Raises RuntimeError with the compiler's log.
    """
    nvrtc = _nvrtc()
    architecture = target(capability, nvrtc.getSupportedArchs())
    path = cache_folder() / cache_name(text, architecture, nvrtc.getVersion())
    with contextlib.suppress(OSError):
        return path.read_bytes()
    made, _ = compile_text(text, architecture)
    with contextlib.suppress(OSError):
        _write(path, made)
    return made


def target(capability: tuple[int, int], supported: Sequence[int]) -> str:
    """Return the architecture to compile for: the device's, an older one of its family, or PTX for a newer family.

    Raises RuntimeError for a device older than all of `supported`.
    """
    number = 10 * capability[0] + capability[1]
    older = [known for known in supported if known <= number]
    if not older:
        raise RuntimeError(
            f"this CUDA device has compute capability {capability[0]}.{capability[1]}; the installed NVRTC compiles "
            f"for {min(supported) / 10} and newer. Install the CuPy of an older CUDA, or use torch without CuPy."
        )
    best = max(older)
    return f"sm_{best}" if best // 10 == capability[0] else f"compute_{best}"


def compile_text(text: str, architecture: str, more_options: Sequence[str] = ()) -> tuple[bytes, str]:
    """Return (code, compiler's log) for an `architecture` such as sm_90 (machine code) or compute_90 (PTX).

    Needs NVRTC but no device.  Raises RuntimeError with the compiler's log.
    """
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(text, f"{PACKAGE}.cu", [], [])
    try:
        nvrtc.compileProgram(program, [f"--gpu-architecture={architecture}", *OPTIONS, *more_options])
        log = nvrtc.getProgramLog(program)
        if architecture.startswith("compute"):
            ptx = nvrtc.getPTX(program)
            return (ptx.encode() if isinstance(ptx, str) else ptx), log
        return nvrtc.getCUBIN(program) + b"\0", log  # CuPy drops the last byte as a string terminator
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise RuntimeError(
            f"NVRTC does not compile {PACKAGE}'s kernels for {architecture} ({error}):\n{log}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def cache_folder() -> Path:
    """Return the folder of compiled kernels: $<PACKAGE>_CACHE, else the package's in the user's cache folder."""
    if given := os.environ.get(f"{PACKAGE.upper()}_CACHE"):
        return Path(given)
    with contextlib.suppress(RuntimeError):  # a user without a home
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / PACKAGE
    return Path(tempfile.gettempdir()) / PACKAGE


def cache_name(text: str, architecture: str, version: tuple[int, int]) -> str:
    """Return the file name for `text` compiled by this version of NVRTC."""
    key = "\0".join([text, architecture, *OPTIONS, str(version)])
    return f"{hashlib.sha256(key.encode()).hexdigest()[:32]}-{architecture}.bin"


def _write(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically: a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def _nvrtc() -> Any:
    return importlib.import_module("cupy").cuda.nvrtc
