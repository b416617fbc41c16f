"""CUDA accelerator: torch.cuda under DeepSpeed's names."""

# ruff: noqa: N801, N802  (DeepSpeed's names)

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from zengine._compat import when_cuda_starts
from zengine.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

__all__ = ["CUDA_Accelerator"]

_cuda: Any = torch.cuda  # parts of it have no types


class CUDA_Accelerator(DeepSpeedAccelerator):
    """CUDA device of this process."""

    _name = "cuda"
    _communication_backend_name = "nccl"
    supports_nvtx_domain = False  # `domain` and `category` of ranges are ignored

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def set_device(self, device_index: int) -> None:
        torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def synchronize(self, device_index: int | None = None) -> None:
        torch.cuda.synchronize(device_index)

    def communication_backend_version(self) -> Any:
        return _cuda.nccl.version()

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def export_envs(self) -> list[str]:
        return ["NCCL"]

    # Random numbers

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def manual_seed(self, seed: int) -> Any:
        return torch.cuda.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return torch.cuda.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return torch.cuda.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.cuda.default_generators[device_index]

    # Streams, graphs and ranges

    @property
    def Stream(self) -> Any:
        return torch.cuda.Stream

    @property
    def Event(self) -> Any:
        return torch.cuda.Event

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return torch.cuda.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        return torch.cuda.default_stream(device_index)

    def is_current_stream_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def create_graph(self) -> Any:
        return _cuda.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        return torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        graph.replay()

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        _cuda.nvtx.range_push(msg)

    def range_pop(self, domain: Any = None) -> None:
        _cuda.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return when_cuda_starts(callback)

    # Memory

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_allocated(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_reserved(device_index)

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return torch.cuda.memory_stats(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        torch.cuda.reset_peak_memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the memory of the device."""
        return int(torch.cuda.mem_get_info(device_index)[1])

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the free memory of the device."""
        return int(torch.cuda.mem_get_info(device_index)[0])

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        torch.cuda.check_error(int(_cuda.cudart().cudaHostRegister(address, num_bytes, 0)))
        return True

    def unregister_host_memory(self, address: int) -> None:
        torch.cuda.check_error(int(_cuda.cudart().cudaHostUnregister(address)))

    # Dtypes

    def is_bf16_supported(self) -> bool:
        """Return torch's answer; True without a device."""
        return not self.is_available() or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Return True from compute capability 7.0 on; True without a device."""
        return not self.is_available() or torch.cuda.get_device_capability()[0] >= 7

    def is_triton_supported(self) -> bool:
        return self.is_available() and torch.cuda.get_device_capability()[0] >= 8

    def _tensor_type(self, dtype: torch.dtype) -> Callable[..., Tensor]:
        return functools.partial(torch.tensor, dtype=dtype, device="cuda")
