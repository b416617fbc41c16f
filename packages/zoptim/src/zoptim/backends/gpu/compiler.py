"""From text to machine code: NVRTC, and a cache of what it made.

NVRTC is called directly, because CuPy's own way adds `-ftz=true`: subnormal moments would become zero, on GPUs only.
Contraction is off, so every product and sum rounds as on a CPU.

The cache is a folder of files named by the digest of all that decides their content.  A file appears by a rename, so
ranks that start together at worst compile the same thing twice.  A folder that cannot be written is no error: then
each process compiles for itself, half a second a program.
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

OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")


def binary(text: str, capability: tuple[int, int]) -> bytes:
    """Machine code (or PTX) of `text` for a device of the given compute capability, from the cache or compiled.

    Raises RuntimeError with the compiler's words.
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
    """Return what to compile for: the device, an older one of its family, or PTX for one that NVRTC does not know
    yet.

    Raises RuntimeError for a device older than all of `supported`.
    """
    number = 10 * capability[0] + capability[1]
    older = [known for known in supported if known <= number]
    if not older:
        raise RuntimeError(
            f"this CUDA device has compute capability {capability[0]}.{capability[1]}; the installed NVRTC compiles "
            f"for {min(supported) / 10} and newer. Install the CuPy of an older CUDA, or train with fused=False."
        )
    best = max(older)
    return f"sm_{best}" if best // 10 == capability[0] else f"compute_{best}"


def compile_text(text: str, architecture: str, more_options: Sequence[str] = ()) -> tuple[bytes, str]:
    """(code, compiler's log) for an `architecture` such as sm_90 (machine code) or compute_90 (PTX).

    Needs NVRTC but no device.  Raises RuntimeError with the compiler's words.
    """
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(text, "zk_gpu.cu", [], [])
    try:
        nvrtc.compileProgram(program, [f"--gpu-architecture={architecture}", *OPTIONS, *more_options])
        log = nvrtc.getProgramLog(program)
        if architecture.startswith("compute"):
            ptx = nvrtc.getPTX(program)
            return (ptx.encode() if isinstance(ptx, str) else ptx), log
        return nvrtc.getCUBIN(program) + b"\0", log  # CuPy drops the last byte as if it ended a string
    except nvrtc.NVRTCError as error:
        words = nvrtc.getProgramLog(program)
        raise RuntimeError(
            f"NVRTC does not compile zoptim's kernels for {architecture} ({error}):\n{words}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def cache_folder() -> Path:
    """Return where compiled kernels are kept: $ZOPTIM_CACHE, else zoptim in the user's cache folder."""
    if given := os.environ.get("ZOPTIM_CACHE"):
        return Path(given)
    with contextlib.suppress(RuntimeError):  # a user without a home
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zoptim"
    return Path(tempfile.gettempdir()) / "zoptim"


def cache_name(text: str, architecture: str, version: tuple[int, int]) -> str:
    """The file that holds `text` compiled by this version of NVRTC."""
    key = "\0".join([text, architecture, *OPTIONS, str(version)])
    return f"{hashlib.sha256(key.encode()).hexdigest()[:32]}-{architecture}.bin"


def _write(path: Path, content: bytes) -> None:
    """Put `content` at `path` at once: a reader sees all of it or no file."""
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
