"""`deepspeed.accelerator.get_accelerator()`: the device of this process, by DeepSpeed's names.

Two classes, for CUDA and the CPU.  On the CPU, memory is the process's own, and there are no streams.
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
    """Return the CUDA accelerator if there is one, else the CPU's; DS_ACCELERATOR (cpu or cuda) overrides."""
    wanted = os.environ.get("DS_ACCELERATOR", "")
    if wanted not in ("", "cpu", "cuda"):
        raise ValueError(f"DS_ACCELERATOR={wanted!r}: zengine runs on cpu and cuda; unset it or set one of them.")
    if wanted == "cuda" or (not wanted and torch.cuda.is_available()):
        return CudaAccelerator()
    return CpuAccelerator()
