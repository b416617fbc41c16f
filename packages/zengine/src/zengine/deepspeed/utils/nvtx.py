"""`deepspeed.utils.nvtx`: ranges for profilers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from zengine.deepspeed.accelerator.real_accelerator import get_accelerator

__all__ = ["DEEPSPEED_NVTX_DOMAIN", "enable_nvtx", "instrument_w_nvtx"]

P = ParamSpec("P")
R = TypeVar("R")

enable_nvtx = True  # set to False, no range is recorded
DEEPSPEED_NVTX_DOMAIN = "DeepSpeed"


def instrument_w_nvtx(func: Callable[P, R]) -> Callable[P, R]:
    """Return `func` inside a range of its name for the duration of each call; none inside torch.compile."""

    @functools.wraps(func)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if not enable_nvtx or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        accelerator = get_accelerator()
        accelerator.range_push(getattr(func, "__qualname__", repr(func)))
        try:
            return func(*args, **kwargs)
        finally:
            accelerator.range_pop()

    return called
