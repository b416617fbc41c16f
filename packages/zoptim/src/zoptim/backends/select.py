"""Which kernels take a device: the C kernels on CPUs, the CuPy kernels on CUDA devices, none elsewhere.

`zoptim.backends.gpu` is imported when a CUDA tensor is first seen, which keeps `import zoptim` short.
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
    """Return what makes a job for tensors on `device`, where `reason_without_kernels` has no reason against it."""
    if device.type == "cpu":
        return CpuJob
    from zoptim.backends import gpu

    return gpu.GpuJob


def has_kernels(device: torch.device | str) -> bool:
    """Return whether optimizers and `grad_stats` use kernels for float tensors on `device`; `kernels()` tells
    more."""
    return reason_without_kernels(torch.device(device)) is None


def reason_without_kernels(device: torch.device) -> str | None:
    """Why no kernel takes tensors of `device`; None when one does."""
    if device.type == "cpu":
        return native.reason_without()
    if device.type == "cuda":
        from zoptim.backends import gpu

        return gpu.reason_without()
    return f"there are no kernels for {device.type} devices"


@attrs.frozen(kw_only=True)
class Kernels:
    """What updates tensors in this process.  Printed, it is a small table."""

    cpu: str  # the instruction set in use, or why the torch path is taken
    levels: tuple[str, ...]  # instruction sets to choose from, worst first; () without the extension
    threads: str  # who runs the CPU kernels
    gpu: str  # the CuPy in use, or why the torch path is taken

    def __str__(self) -> str:
        levels = ", ".join(self.levels) or native.OFF
        rows = {"cpu": self.cpu, "available": levels, "threads": self.threads, "gpu": self.gpu}
        return "\n".join(f"{name:10}{value}" for name, value in rows.items())


def kernels() -> Kernels:
    """Return what runs here, and why nothing faster does.

    Raises `ValueError` for a ZOPTIM_KERNELS that names nothing that runs here, and `ImportError` in a checkout
    whose extension is older than its sources.
    """
    from zoptim.backends import gpu  # imports CuPy to ask it

    found = native.library()
    no_gpu = gpu.reason_without()
    return Kernels(
        cpu=str(native.reason_without()) if found is None else found.level(),
        levels=() if found is None else found.levels,
        threads=native.POOL if found is None else found.threads,  # torch's own operations run in its pool
        gpu=f"cupy {importlib.import_module('cupy').__version__}" if no_gpu is None else no_gpu,
    )
