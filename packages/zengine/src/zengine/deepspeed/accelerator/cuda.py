"""CUDA accelerator: torch.cuda, with the methods of DeepSpeed's accelerators."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

__all__ = ["CudaAccelerator"]

_FORWARDED = frozenset(
    (
        *("is_available", "current_device", "device_count", "set_device", "synchronize", "device"),
        *("manual_seed", "manual_seed_all", "initial_seed", "get_rng_state", "set_rng_state"),
        *("stream", "current_stream", "default_stream", "Stream", "Event", "empty_cache"),
        *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
        *("reset_peak_memory_stats", "reset_max_memory_allocated", "memory_stats", "is_bf16_supported"),
        *("get_device_properties", "get_device_capability", "CUDAGraph", "graph", "ipc_collect"),
    )
)


@final
class CudaAccelerator:
    """CUDA device of this process; names in _FORWARDED are torch.cuda's own."""

    _name = "cuda"
    _communication_backend_name = "nccl"
    _nvtx: Any = torch.cuda.nvtx

    def __getattr__(self, name: str) -> Any:
        if name in _FORWARDED:
            return getattr(torch.cuda, name)
        raise AttributeError(f"get_accelerator() has no {name!r}; use torch.cuda")

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        halves = [torch.bfloat16] if torch.cuda.is_bf16_supported() else []
        return [torch.float32, torch.float16, *halves]

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the memory of the device, in bytes."""
        return int(torch.cuda.mem_get_info(device_index)[1])

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the free memory of the device, in bytes."""
        return int(torch.cuda.mem_get_info(device_index)[0])

    def range_push(self, message: str) -> None:
        self._nvtx.range_push(message)

    def range_pop(self) -> None:
        self._nvtx.range_pop()

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        return tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cuda"

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]
