"""Launches of kernels: the protocol, and its implementation by CuPy.

A kernel has one parameter, a struct by value.  The caller packs the struct, so a launch is (program, number of
blocks, bytes), and the tests launch with the same bytes as a GPU.  Tables of addresses are in the struct: a CUDA
graph keeps its own copy, and nothing is allocated for a launch.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from zprecision._compat import has_plain_memory
from zprecision.backends.gpu import compiler

__all__ = [
    "CupyLauncher",
    "Launcher",
    "Program",
    "has_gpu_kernels",
    "kernels_source",
    "launcher_of",
    "reason_without",
]

NUM_THREADS = 256  # of a block (ZQ_THREADS)
CSRC = Path(__file__).resolve().parents[2] / "csrc"


@functools.cache
def kernels_source() -> str:
    """Return the CUDA text, from the package's data: prelude, formats, kernels, without #include lines."""
    parts = [(CSRC / name).read_text() for name in ("zk_gpu.h", "zq_gpu.h", "zq_gpu.cu")]
    return "\n".join(line for line in "".join(parts).splitlines() if not line.startswith('#include "')) + "\n"


@attrs.frozen
class Program:
    """One compilation of the text."""

    kernel: str  # the name of the kernel that is launched
    defines: tuple[tuple[str, int], ...] = ()  # constants of the text

    def text(self) -> str:
        """Return the text with its constants."""
        return "".join(f"#define {name} {value}\n" for name, value in self.defines) + kernels_source()


class Launcher(Protocol):
    """Runs kernels on the memory of one device."""

    def launch(self, program: Program, num_blocks: int, args: bytes) -> None:
        """Launch the kernel of a program, compiled on first use; `num_blocks` is at least 1."""


@attrs.frozen
class _Stream:
    """A stream as CuPy reads it."""

    ptr: int


class CupyLauncher:
    """Launches on torch's current stream, as torch's operations do."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cupy = importlib.import_module("cupy")

    def launch(self, program: Program, num_blocks: int, args: bytes) -> None:
        """See Launcher.  Raises RuntimeError if the first use is in the capture of a CUDA graph."""
        numpy = importlib.import_module("numpy")  # a dependency of CuPy
        with torch.cuda.device(self._device), self._cupy.cuda.Device(self._device.index):
            kernel = _load(self._device.index, program)
            struct = numpy.frombuffer(args, dtype=f"V{len(args)}")  # one element: CuPy passes it by value
            stream = _Stream(torch.cuda.current_stream(self._device).cuda_stream)
            kernel((num_blocks,), (NUM_THREADS,), (struct,), stream=stream)


# Modules are loaded once per process and device, and never unloaded.
@functools.cache
def _load(index: int, program: Program) -> Any:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"zprecision has to load its kernel {program.kernel}, which a CUDA graph cannot capture. "
            "Call the same function with the same number of tokens once before torch.cuda.graph(...)."
        )
    module = importlib.import_module("cupy").cuda.function.Module()
    module.load(compiler.binary(program.text(), torch.cuda.get_device_capability(index)))
    return module.get_function(program.kernel)


def launcher_of(*tensors: Tensor | None) -> Launcher | None:
    """Return the launcher of the device that all tensors are on; None if kernels cannot read one of them.

    They read plain CUDA tensors: subclasses may have no address.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    device = given[0].device
    is_plain = all(has_plain_memory(type(each)) and each.device == device for each in given)
    return _launcher(device) if is_plain and has_gpu_kernels(device) else None


@functools.cache
def _launcher(device: torch.device) -> CupyLauncher:
    return CupyLauncher(device)


def has_gpu_kernels(device: torch.device) -> bool:
    """Return whether tensors on `device` have GPU kernels.  Warns once if it is a CUDA device without."""
    if device.type != "cuda":
        return False
    reason = _known_reason()
    if reason is not None:
        _warn_once(reason)
    return reason is None


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"zprecision uses torch's operations on CUDA tensors: {reason}", RuntimeWarning, stacklevel=4)


@functools.cache
def _known_reason() -> str | None:
    return reason_without()


def reason_without() -> str | None:
    """Return the reason why CUDA tensors have no kernels; None if they have.  Imports CuPy if there is a device."""
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False: there is no CUDA device, or this torch is built without CUDA"
    if torch.version.cuda is None:
        return "this torch is built for ROCm; the GPU kernels are CUDA"
    major = torch.version.cuda.split(".")[0]
    try:
        importlib.import_module("cupy").cuda.nvrtc.getVersion()
    except ImportError as error:
        return f"CuPy cannot be imported ({error}): pip install 'zprecision[cuda{major}]'"
    except Exception as error:  # the search for a shared library raises many types
        wheel = "nvidia-cuda-nvrtc-cu12" if major == "12" else "nvidia-cuda-nvrtc"
        return f"CuPy finds no NVRTC ({error}): pip install {wheel}"
    return None
