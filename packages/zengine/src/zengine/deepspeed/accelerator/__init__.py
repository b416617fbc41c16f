"""`deepspeed.accelerator.get_accelerator()`: the device that this process computes on, as DeepSpeed's scripts ask.

Two classes: a CPU answers every question about memory with the process's own, and has no streams.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from zengine.deepspeed.accelerator.cpu import CpuAccelerator
from zengine.deepspeed.accelerator.cuda import CudaAccelerator

__all__ = ["CpuAccelerator", "CudaAccelerator", "get_accelerator"]


@functools.cache
def get_accelerator() -> Any:
    """CUDA where there is one, else the CPU; DS_ACCELERATOR (cpu or cuda) decides otherwise."""
    wanted = os.environ.get("DS_ACCELERATOR", "")
    if wanted not in ("", "cpu", "cuda"):
        raise ValueError(
            f"DS_ACCELERATOR={wanted!r}: zengine computes on cpu and cuda; unset it or name one of them."
        )
    if wanted == "cuda" or (not wanted and torch.cuda.is_available()):
        return CudaAccelerator()
    return CpuAccelerator()
