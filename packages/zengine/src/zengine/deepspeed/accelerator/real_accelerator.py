"""`deepspeed.accelerator.real_accelerator`: the accelerator of this process.

Like DeepSpeed, this keeps one per process: `get_accelerator()` has no argument that could carry one.
"""

from __future__ import annotations

import os

import torch

from zengine.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from zengine.deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from zengine.deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

__all__ = ["SUPPORTED_ACCELERATOR_LIST", "get_accelerator", "is_current_accelerator_supported", "set_accelerator"]

SUPPORTED_ACCELERATOR_LIST = ["cuda", "cpu"]

ds_accelerator: DeepSpeedAccelerator | None = None  # the one in use; None until it is asked for


def get_accelerator() -> DeepSpeedAccelerator:
    """Return the accelerator: set_accelerator's, otherwise CUDA's if there is a device, otherwise the CPU's.

    DS_ACCELERATOR (cpu or cuda) overrides the detection.  Raises ValueError for another value.
    """
    if ds_accelerator is None:
        wanted = os.environ.get("DS_ACCELERATOR") or ("cuda" if torch.cuda.is_available() else "cpu")
        if wanted not in SUPPORTED_ACCELERATOR_LIST:
            raise ValueError(
                f"DS_ACCELERATOR must be one of {SUPPORTED_ACCELERATOR_LIST}: {wanted!r} is not supported by "
                "zengine. Unset it, or pass an accelerator of your own to set_accelerator()."
            )
        set_accelerator(CUDA_Accelerator() if wanted == "cuda" else CPU_Accelerator())
    assert ds_accelerator is not None
    return ds_accelerator


def set_accelerator(accel_obj: DeepSpeedAccelerator) -> None:
    """Make `accel_obj` the accelerator of this process.

    Raises AssertionError (DeepSpeed's) unless it is a DeepSpeedAccelerator.
    """
    if not isinstance(accel_obj, DeepSpeedAccelerator):
        raise AssertionError(
            f"{accel_obj.__class__.__name__} accelerator is not subclass of DeepSpeedAccelerator "
            "(zengine.deepspeed.accelerator.abstract_accelerator)."
        )
    globals()["ds_accelerator"] = accel_obj


def is_current_accelerator_supported() -> bool:
    """Return True unless a script has set an accelerator for another device."""
    return get_accelerator().device_name() in SUPPORTED_ACCELERATOR_LIST
