"""Kernel launches: the protocol, and its implementation by CuPy.

A kernel has one parameter, a struct by value.  The caller packs the struct, so every launch is (kernel, number of
blocks, bytes), and the tests launch with the same bytes as a GPU.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import attrs
import torch
from torch import Tensor

from zoptim.backends.gpu import compiler
from zoptim.backends.gpu.source import Program

__all__ = ["Call", "CupyLauncher", "Kernel", "Launcher", "reason_without"]

NUM_THREADS = 256  # of a block (ZK_THREADS)

Kernel = Any  # the launcher's own handle


class Call(NamedTuple):
    """One launch."""

    kernel: Kernel
    num_blocks: int  # at least 1
    args: bytes  # the struct, packed


class Launcher(Protocol):
    """Runs kernels on the memory of one device."""

    def load(self, program: Program) -> Mapping[str, Kernel]:
        """Compile and load `program`; return its kernels by name, ready to be launched."""

    def launch(self, calls: Sequence[Call], buffers: Sequence[Tensor]) -> None:
        """Launch in order; `buffers` are tensors in use that the caller may drop before the kernels have run."""


@attrs.frozen
class _Stream:
    """A stream as CuPy reads it."""

    ptr: int


class CupyLauncher:
    """Launches on torch's current stream, which changes during capture of a graph and is read at every launch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._home = torch.cuda.current_stream(device)  # the stream on which the job's buffers are allocated
        self._cupy = importlib.import_module("cupy")

    def load(self, program: Program) -> Mapping[str, Kernel]:
        """See Launcher.  Raises RuntimeError during capture of a graph, and if NVRTC rejects the text."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "zoptim has to load kernels and make tables, which a CUDA graph cannot capture. "
                "Make one step with the same parameters before torch.cuda.graph(...)."
            )
        with torch.cuda.device(self._device), self._cupy.cuda.Device(self._device.index):
            return _load(self._device.index, program)

    def launch(self, calls: Sequence[Call], buffers: Sequence[Tensor]) -> None:
        """See Launcher."""
        with torch.cuda.device(self._device), self._cupy.cuda.Device(self._device.index):
            stream = torch.cuda.current_stream(self._device)
            for kernel, num_blocks, args in calls:
                kernel((num_blocks,), (NUM_THREADS,), (_by_value(args),), stream=_Stream(stream.cuda_stream))
            if stream != self._home and not torch.cuda.is_current_stream_capturing():
                for buffer in buffers:
                    buffer.record_stream(stream)


def reason_without() -> str | None:
    """Return the reason why CUDA tensors have no kernels; None if they have.  Imports CuPy if there is a device."""
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False: there is no CUDA device, or this torch is built without CUDA"
    if torch.version.cuda is None:
        return "this torch is built for ROCm; the GPU kernels are CUDA"
    major = torch.version.cuda.split(".")[0]
    try:
        cupy = importlib.import_module("cupy")
        cupy.cuda.nvrtc.getVersion()
    except ImportError as error:
        return f"CuPy cannot be imported ({error}): pip install 'zoptim[cuda{major}]'"
    except Exception as error:  # the search for a shared library raises many types
        wheel = "nvidia-cuda-nvrtc-cu12" if major == "12" else "nvidia-cuda-nvrtc"
        return f"CuPy finds no NVRTC ({error}): pip install {wheel}"
    return None


# Modules are loaded once per process and device, and never unloaded: other jobs may use them.
@functools.cache
def _load(index: int, program: Program) -> Mapping[str, Callable[..., None]]:
    cupy = importlib.import_module("cupy")
    module = cupy.cuda.function.Module()
    module.load(compiler.binary(program.text(), torch.cuda.get_device_capability(index)))
    return {name: module.get_function(name) for name in program.kernels}


def _by_value(args: bytes) -> Any:
    """Return bytes as CuPy passes a struct: an array of one element."""
    numpy = importlib.import_module("numpy")  # a dependency of CuPy
    return numpy.frombuffer(args, dtype=f"V{len(args)}")
