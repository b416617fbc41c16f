"""CuPy's place: kernels are compiled for the CPU by the shim of their tests, and launched on simulated streams.

Only what zoptim and zprecision call.  A launch runs at once, behind everything that its stream waits for, because the
order checker learns from the shim's loads and stores what a kernel touches.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import types
from pathlib import Path
from typing import Any

from simulated_cuda.environment import CACHE
from simulated_cuda.library import library

__all__ = ["cuda"]

SHIM = Path(__file__).resolve().parent.parent.parent / "packages" / "zoptim" / "tests" / "shim"
FLAGS = ("-std=gnu11", "-O1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing")


class NVRTCError(RuntimeError):
    """As cupy.cuda.nvrtc.NVRTCError."""


class _Program:
    def __init__(self, text: str) -> None:
        self.text = text
        self.options: tuple[str, ...] = ()


def _compile(text: str) -> Path:
    """Return the shared object of a CUDA text."""
    key = hashlib.sha256("\0".join([text, *FLAGS, *(p.read_text() for p in sorted(SHIM.iterdir()))]).encode())
    path = CACHE / "kernels" / f"{key.hexdigest()[:24]}.so"
    if path.exists():
        return path
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise NVRTCError("the simulated device needs a C compiler for kernels")
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_name(f"{path.stem}.{os.getpid()}.c")
    made = source.with_suffix(".tmp")
    source.write_text(text)
    inputs = ["-include", "cuda_shim.h", str(source), str(SHIM / "shim.c")]
    command = [compiler, *FLAGS, f"-I{SHIM}", "-shared", *inputs, "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    source.unlink()
    if done.returncode:
        raise NVRTCError(done.stderr[-2000:])
    made.replace(path)
    return path


class _Function:
    """A kernel; called as CuPy's functions are."""

    def __init__(self, shared: ctypes.CDLL, name: str) -> None:
        self._shared = shared  # kept loaded
        self._name = name.encode()
        self._address = ctypes.cast(getattr(shared, name), ctypes.c_void_p).value
        self._hook = ctypes.addressof(ctypes.c_void_p.in_dll(shared, "shim_touch"))

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], *, stream: Any) -> None:
        (struct,) = args
        if grid[0] < 1 or struct.size != 1:
            raise ValueError(f"simulated CuPy: grid {grid}, {struct.size} structs; expected a grid and one struct")
        data = struct.tobytes()
        if library().sim_launch_kernel(self._name, self._address, self._hook, grid[0], data, len(data), stream.ptr):
            raise RuntimeError(library().sim_last_error().decode())


class _Module:
    def load(self, binary: bytes) -> None:
        self._shared = ctypes.CDLL(binary.rstrip(b"\0").decode())

    def get_function(self, name: str) -> _Function:
        return _Function(self._shared, name)


class _Device:
    """The context manager cupy.cuda.Device."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> _Device:
        return self

    def __exit__(self, *_: object) -> None: ...


def _compile_program(program: _Program, options: list[str]) -> None:
    program.options = tuple(options)


# The binary of a program is the path of its shared object.
_nvrtc = types.SimpleNamespace(
    NVRTCError=NVRTCError,
    getVersion=lambda: (13, 0),
    getSupportedArchs=lambda: [80, 90, 100],
    createProgram=lambda text, name, headers, names: _Program(text),
    compileProgram=_compile_program,
    getProgramLog=lambda program: "",
    getPTX=lambda program: str(_compile(program.text)),
    getCUBIN=lambda program: str(_compile(program.text)).encode(),
    destroyProgram=lambda program: None,
)
cuda = types.SimpleNamespace(nvrtc=_nvrtc, function=types.SimpleNamespace(Module=_Module), Device=_Device)
