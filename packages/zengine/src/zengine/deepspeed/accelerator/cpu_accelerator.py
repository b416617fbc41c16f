"""CPU accelerator: memory is the process's own, calls are synchronous, and there are no streams."""

# ruff: noqa: N801, N802  (DeepSpeed's names)

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from zengine._compat import cpu_has_fp16
from zengine.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

__all__ = ["CPU_Accelerator"]

_PAGE_NBYTES = resource.getpagesize()
_TENSOR_TYPES: dict[torch.dtype, Callable[..., Tensor]] = {
    torch.bfloat16: torch.BFloat16Tensor,
    torch.uint8: torch.ByteTensor,
    torch.float64: torch.DoubleTensor,
    torch.float32: torch.FloatTensor,
    torch.float16: torch.HalfTensor,
    torch.int32: torch.IntTensor,
    torch.int64: torch.LongTensor,
}


class CPU_Accelerator(DeepSpeedAccelerator):
    """CPU of this process.  Peaks are of the values that were asked for since the last reset."""

    _name = "cpu"
    _communication_backend_name = "gloo"

    def __init__(self) -> None:
        self._peak = _resident()

    def is_available(self) -> bool:
        return True

    def is_synchronized_device(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def current_device_name(self) -> str:
        return "cpu"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device_index: int) -> None:
        """Do nothing: the CPU is one device."""

    def current_device(self) -> int:
        """Return LOCAL_RANK, or 0."""
        return int(os.environ.get("LOCAL_RANK", 0))

    def device_count(self) -> int:
        """Return LOCAL_SIZE if it is set, otherwise the number of NUMA nodes that have cores."""
        if int(os.environ.get("LOCAL_SIZE", 0)) > 0:
            return int(os.environ["LOCAL_SIZE"])
        from zengine.deepspeed.utils.numa import get_numa_cores  # importing its package asks for the accelerator

        return max(1, len({tuple(cores) for cores in get_numa_cores() if cores}))

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: calls are synchronous."""

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def export_envs(self) -> list[str]:
        return []

    # Random numbers

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    # Streams, graphs and ranges, of which there are none

    @property
    def Stream(self) -> None:
        return None

    @property
    def Event(self) -> None:
        return None

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def current_stream(self, device_index: int | None = None) -> None:
        return None

    def default_stream(self, device_index: int | None = None) -> None:
        return None

    def create_graph(self) -> None:
        return None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[None]:
        return nullcontext()

    def replay_graph(self, graph: Any) -> None:
        """Do nothing: what was captured has run."""

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """Do nothing: there is no profiler to tell."""

    def range_pop(self, domain: Any = None) -> None:
        """Do nothing."""

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback()

    # Memory

    def empty_cache(self) -> None:
        """Do nothing: torch has no cache of host memory."""

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the resident bytes of this process."""
        now = _resident()
        self._peak = max(self._peak, now)
        return now

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self.memory_allocated()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        self.memory_allocated()
        return self._peak

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self.max_memory_allocated()

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        now = self.memory_allocated()
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": self._peak}

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self._peak = _resident()

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the memory of the host."""
        return _meminfo("MemTotal")

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the available memory of the host."""
        return _meminfo("MemAvailable")

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """Return `tensor`: no device copies from page-locked memory here."""
        return tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")

    def is_pinned(self, tensor: Tensor) -> bool:
        return False

    # Dtypes

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        """Return True if torch's matrix products have fp16 kernels for this CPU.

        The config's `fp16` works without them, slowly.
        """
        return cpu_has_fp16()

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return float32, bfloat16, and float16 where it is fast."""
        return [torch.float32, torch.bfloat16, *([torch.float16] if self.is_fp16_supported() else [])]

    def _tensor_type(self, dtype: torch.dtype) -> Callable[..., Tensor]:
        return _TENSOR_TYPES[dtype]


def _resident() -> int:
    """Return the resident bytes of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE_NBYTES


def _meminfo(key: str) -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines[key].split()[0]) * 1024
