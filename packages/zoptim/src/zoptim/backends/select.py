"""Selection of kernels: the C kernels on CPUs, the CuPy kernels on CUDA devices, none elsewhere.

The first CUDA tensor imports `zoptim.backends.gpu`, so `import zoptim` stays cheap.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import attrs
import torch

from zoptim.backends import native
from zoptim.backends.contract import Job, Streams
from zoptim.backends.cpu import CpuJob

__all__ = ["Kernels", "has_kernels", "job_for", "kernels", "reason_without_kernels"]

MakeJob = Callable[[str, int, Streams], Job]  # rule, flags, streams


def job_for(device: torch.device) -> MakeJob:
    """Return the constructor of jobs on `device`, for which `reason_without_kernels` must be None."""
    if device.type == "cpu":
        return CpuJob
    from zoptim.backends import gpu

    return gpu.GpuJob


def has_kernels(device: torch.device | str) -> bool:
    """Return whether optimizers and `grad_stats` use kernels for float tensors on `device`; see `kernels()`."""
    return reason_without_kernels(torch.device(device)) is None


def reason_without_kernels(device: torch.device) -> str | None:
    """Return the reason why tensors on `device` have no kernels, for messages; None if they have."""
    if device.type == "cpu":
        return native.reason_without()
    if device.type == "cuda":
        from zoptim.backends import gpu

        return gpu.reason_without()
    return f"there are no kernels for {device.type} devices"


@attrs.frozen(kw_only=True)
class Kernels:
    """The kernels in use in this process.  `str()` is a small table."""

    cpu: str  # the instruction set in use, or the reason for the torch path
    levels: tuple[str, ...]  # available instruction sets, slowest first; () without the extension
    threads: str  # the thread pool of the CPU kernels
    gpu: str  # the CuPy in use, or the reason for the torch path

    def __str__(self) -> str:
        levels = ", ".join(self.levels) or native.OFF
        rows = {"cpu": self.cpu, "available": levels, "threads": self.threads, "gpu": self.gpu}
        return "\n".join(f"{name:10}{value}" for name, value in rows.items())


def kernels() -> Kernels:
    """Return the kernels in use, and the reasons where there are none.

    Raises `ValueError` if ZOPTIM_KERNELS names kernels that do not run here, and `ImportError` in a checkout whose
    extension is older than its sources.
    """
    from zoptim.backends import gpu  # imports CuPy

    found = native.library()
    no_gpu = gpu.reason_without()
    return Kernels(
        cpu=str(native.reason_without()) if found is None else found.level(),
        levels=() if found is None else found.levels,
        threads=native.POOL if found is None else found.threads,  # torch's own operations run in its pool
        gpu=f"cupy {importlib.import_module('cupy').__version__}" if no_gpu is None else no_gpu,
    )
