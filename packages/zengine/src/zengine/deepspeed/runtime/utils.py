"""`deepspeed.runtime.utils`."""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
from torch import Tensor

from zengine.data import RepeatingLoader

__all__ = ["RepeatingLoader", "empty_cache", "move_to_device", "see_memory_usage"]

log = logging.getLogger("zengine")


def move_to_device(item: Any, device: torch.device | str, criterion_func: Any = None) -> Any:
    """Return `item` with the tensors in its dicts, lists and tuples on `device`; `criterion_func` selects them."""
    if isinstance(item, Tensor):
        return item.to(device) if criterion_func is None or criterion_func(item) else item
    if isinstance(item, dict):
        return {name: move_to_device(each, device, criterion_func) for name, each in item.items()}
    if isinstance(item, (list, tuple)) and not hasattr(item, "_fields"):
        return type(item)(move_to_device(each, device, criterion_func) for each in item)
    return item


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the allocated memory of the device, or the resident memory on a CPU; does nothing without `force`."""
    if not force:
        return
    if torch.cuda.is_available():
        now, peak = torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
        log.warning("%s: %.2f GiB allocated on the device, peak %.2f GiB", message, now, peak)
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    log.warning("%s: %.2f GiB resident", message, pages * 4096 / 2**30)


def empty_cache() -> None:
    """Collect Python's garbage and empty the device's cache."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
