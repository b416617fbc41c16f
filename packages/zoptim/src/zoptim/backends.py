"""Which kernels take a device: the C kernels on CPUs, the CuPy kernels on CUDA devices, none elsewhere.

`zoptim.gpu` is imported when a CUDA tensor is first seen, which keeps `import zoptim` short.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import native
from .job import CpuJob, Job, Streams

__all__ = ["has_kernels", "job_for", "why_none"]

MakeJob = Callable[[int, int, Streams], Job]  # rule, flags, streams


def job_for(device: torch.device) -> MakeJob:
    """What makes a job for tensors on `device`, where `why_none` has no reason against it."""
    if device.type == "cpu":
        return CpuJob
    from . import gpu

    return gpu.GpuJob


def has_kernels(device: torch.device | str) -> bool:
    """Whether optimizers and `grad_stats` use kernels for float tensors on `device`; `kernels()` tells more."""
    return why_none(torch.device(device)) is None


def why_none(device: torch.device) -> str | None:
    """Why no kernel takes tensors of `device`; None when one does."""
    if device.type == "cpu":
        return native.reason_without()
    if device.type == "cuda":
        from . import gpu

        return gpu.reason_without()
    return f"there are no kernels for {device.type} devices"
