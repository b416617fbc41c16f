"""CPU accelerator, with the methods of DeepSpeed's accelerators."""

from __future__ import annotations

import resource
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor

__all__ = ["CpuAccelerator"]

_PAGE_NBYTES = resource.getpagesize()


def _statm(column: int) -> int:
    """Return the bytes in a column of /proc/self/statm: 0 virtual, 1 resident."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[column]) * _PAGE_NBYTES


@final
class CpuAccelerator:
    """CPU of this process: memory is the process's, calls are synchronous, and streams are empty contexts."""

    _name = "cpu"
    _communication_backend_name = "gloo"

    def is_available(self) -> bool:
        return True

    def is_synchronized_device(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def current_device_name(self) -> str:
        return "cpu"

    def device(self, device_index: int | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        """Return 1: the CPU is one device for all ranks of a host."""
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def current_stream(self, device_index: int | None = None) -> None:
        return None

    default_stream = current_stream

    def empty_cache(self) -> None: ...

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the resident bytes of this process."""
        return _statm(1)

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the peak of the resident bytes."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None: ...

    reset_max_memory_allocated = reset_peak_memory_stats

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the memory of the host, in bytes."""
        return _meminfo("MemTotal")

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the available memory of the host, in bytes."""
        return _meminfo("MemAvailable")

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        """Return True: fp16 trains on a CPU, so that its logic can be tested."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    def range_push(self, message: str) -> None: ...

    def range_pop(self) -> None: ...

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return False

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def visible_devices_envs(self) -> list[str]:
        return []


def _meminfo(key: str) -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines[key].split()[0]) * 1024
