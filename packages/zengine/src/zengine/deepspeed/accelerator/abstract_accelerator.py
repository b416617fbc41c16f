"""`deepspeed.accelerator.abstract_accelerator`: what a script may ask of its device.

`DeepSpeedAccelerator` is the base of the CPU's and CUDA's accelerators, and of one that a script passes to
`set_accelerator`.  Answers that torch gives in one way for every device are methods here; the others are abstract.
"""

# ruff: noqa: N802  (DeepSpeed's names of classes that are attributes: Stream, Event, FloatTensor, ...)

from __future__ import annotations

import abc
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

__all__ = ["DeepSpeedAccelerator"]

_BUILDERS = "zengine.deepspeed.ops.op_builder"  # imported on use: its builders ask for the accelerator


class DeepSpeedAccelerator(abc.ABC):
    """Device of this process, by DeepSpeed's names.  Memory is in bytes."""

    _name: str = ""  # torch's device type
    _communication_backend_name: str = ""  # for torch.distributed
    _compile_backend: str = "inductor"  # for torch.compile

    # The device

    @abc.abstractmethod
    def is_available(self) -> bool: ...

    @abc.abstractmethod
    def is_synchronized_device(self) -> bool:
        """Return True if calls return when their work is done."""

    @abc.abstractmethod
    def device_name(self, device_index: int | None = None) -> str: ...

    @abc.abstractmethod
    def device(self, device_index: int | None = None) -> torch.device: ...

    @abc.abstractmethod
    def set_device(self, device_index: int) -> None: ...

    @abc.abstractmethod
    def current_device(self) -> int: ...

    @abc.abstractmethod
    def current_device_name(self) -> str: ...

    @abc.abstractmethod
    def device_count(self) -> int: ...

    @abc.abstractmethod
    def synchronize(self, device_index: int | None = None) -> None: ...

    @abc.abstractmethod
    def visible_devices_envs(self) -> list[str]:
        """Return the environment variables that select devices."""

    @abc.abstractmethod
    def export_envs(self) -> list[str]:
        """Return prefixes of environment variables that a launcher passes to other hosts."""

    def use_host_timers(self) -> bool:
        """Return True if the host's clock times the device's work."""
        return self.is_synchronized_device()

    def resolves_data_dependency(self) -> bool:
        """Return True if work is ordered without streams."""
        return self.is_synchronized_device()

    def handles_memory_backpressure(self) -> bool:
        """Return True if allocations wait for work that frees memory."""
        return self.is_synchronized_device()

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def communication_backend_version(self) -> Any:
        """Return NCCL's version on CUDA, otherwise None."""
        return None

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        """Select devices in an environment for a process to be started."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    # Random numbers

    @abc.abstractmethod
    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None: ...

    @abc.abstractmethod
    def get_rng_state(self, device_index: int | None = None) -> Tensor: ...

    @abc.abstractmethod
    def manual_seed(self, seed: int) -> Any: ...

    @abc.abstractmethod
    def manual_seed_all(self, seed: int) -> Any: ...

    @abc.abstractmethod
    def initial_seed(self) -> int: ...

    @abc.abstractmethod
    def default_generator(self, device_index: int) -> torch.Generator: ...

    def random(self) -> Any:
        """Return torch.random."""
        return torch.random

    # Streams and events

    @property
    @abc.abstractmethod
    def Stream(self) -> Any: ...

    @property
    @abc.abstractmethod
    def Event(self) -> Any: ...

    @abc.abstractmethod
    def stream(self, stream: Any) -> AbstractContextManager[Any]: ...

    @abc.abstractmethod
    def current_stream(self, device_index: int | None = None) -> Any: ...

    @abc.abstractmethod
    def default_stream(self, device_index: int | None = None) -> Any: ...

    # Memory

    @abc.abstractmethod
    def empty_cache(self) -> None: ...

    @abc.abstractmethod
    def memory_allocated(self, device_index: int | None = None) -> int: ...

    @abc.abstractmethod
    def max_memory_allocated(self, device_index: int | None = None) -> int: ...

    @abc.abstractmethod
    def memory_reserved(self, device_index: int | None = None) -> int: ...

    @abc.abstractmethod
    def max_memory_reserved(self, device_index: int | None = None) -> int: ...

    @abc.abstractmethod
    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]: ...

    @abc.abstractmethod
    def reset_peak_memory_stats(self, device_index: int | None = None) -> None: ...

    @abc.abstractmethod
    def total_memory(self, device_index: int | None = None) -> int: ...

    @abc.abstractmethod
    def available_memory(self, device_index: int | None = None) -> int: ...

    def memory_cached(self, device_index: int | None = None) -> int:
        """Return `memory_reserved`; torch's former name."""
        return self.memory_reserved(device_index)

    def max_memory_cached(self, device_index: int | None = None) -> int:
        """Return `max_memory_reserved`; torch's former name."""
        return self.max_memory_reserved(device_index)

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """Call `reset_peak_memory_stats`."""
        self.reset_peak_memory_stats(device_index)

    def reset_max_memory_cached(self, device_index: int | None = None) -> None:
        """Call `reset_peak_memory_stats`."""
        self.reset_peak_memory_stats(device_index)

    # Page-locked host memory

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """Return `tensor` in page-locked memory.

        make_copy=False: the values are undefined.  match_shape=False: then the result has one dimension.
        """
        if make_copy:
            return tensor.pin_memory()
        return tensor.new_empty(tensor.shape if match_shape else (tensor.numel(),), device="cpu", pin_memory=True)

    def pin_empty(self, *size: Any, dtype: torch.dtype, device: str | torch.device = "cpu") -> Tensor:
        """Return an uninitialized page-locked tensor.  Raises ValueError unless `device` is the CPU."""
        if torch.device(device).type != "cpu":
            raise ValueError(f"pin_empty() allocates host memory: pass device='cpu', not {str(device)!r}.")
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        return self.pin_memory(torch.empty(shape, dtype=dtype, device="meta"), make_copy=False)

    def pin_empty_like(
        self, tensor: Tensor, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return an uninitialized page-locked tensor of that shape."""
        return self.pin_empty(tuple(tensor.shape), dtype=dtype or tensor.dtype, device=device)

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

    def unpin_memory(self, tensor: Tensor) -> None:
        """Do nothing: torch frees page-locked memory with its tensor."""
        return None  # noqa: RET501

    def pin_memory_alignment(self) -> int:
        """Return 1: torch's allocator aligns page-locked memory."""
        return 1

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        """Page-lock memory that the caller owns; return False if the device has no use for it."""
        return False

    def unregister_host_memory(self, address: int) -> None:
        """Undo `register_host_memory`."""
        return None  # noqa: RET501

    # Dtypes

    @abc.abstractmethod
    def is_bf16_supported(self) -> bool: ...

    @abc.abstractmethod
    def is_fp16_supported(self) -> bool: ...

    def is_fp64_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that train fast on this device, float32 first."""
        halves = ((torch.float16, self.is_fp16_supported()), (torch.bfloat16, self.is_bf16_supported()))
        return [torch.float32, *(dtype for dtype, is_supported in halves if is_supported)]

    @abc.abstractmethod
    def _tensor_type(self, dtype: torch.dtype) -> Callable[..., Tensor]:
        """Return a function that makes a tensor of `dtype` on this device from numbers."""

    @property
    def BFloat16Tensor(self) -> Callable[..., Tensor]:
        return self._tensor_type(torch.bfloat16)

    @property
    def ByteTensor(self) -> Callable[..., Tensor]:
        return self._tensor_type(torch.uint8)

    @property
    def DoubleTensor(self) -> Callable[..., Tensor]:
        return self._tensor_type(torch.float64)

    @property
    def FloatTensor(self) -> Callable[..., Tensor]:
        return self._tensor_type(torch.float32)

    @property
    def HalfTensor(self) -> Callable[..., Tensor]:
        return self._tensor_type(torch.float16)

    @property
    def IntTensor(self) -> Callable[..., Tensor]:
        return self._tensor_type(torch.int32)

    @property
    def LongTensor(self) -> Callable[..., Tensor]:
        return self._tensor_type(torch.int64)

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    # Graphs of captured work

    @abc.abstractmethod
    def create_graph(self) -> Any: ...

    @abc.abstractmethod
    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]: ...

    @abc.abstractmethod
    def replay_graph(self, graph: Any) -> None: ...

    def is_current_stream_capturing(self) -> bool:
        return False

    # Profiler ranges, compilers and kernels

    @abc.abstractmethod
    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None: ...

    @abc.abstractmethod
    def range_pop(self, domain: Any = None) -> None: ...

    @abc.abstractmethod
    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call `callback` when the device is initialized."""

    def is_triton_supported(self) -> bool:
        return False

    def prefer_triton_grouped_mm(self) -> bool:
        """Return False: experts use torch's grouped matrix product."""
        return False

    def get_compile_backend(self) -> str:
        """Return the backend for torch.compile; "inductor" unless it was set."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Set it.  Raises ValueError for a backend that torch does not know."""
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"{backend} not supported by {self.device_name()}. Supported Backends are {known}")
        self._compile_backend = backend

    def op_builder_dir(self) -> str:
        """Return the name of the module that has the op builders."""
        return _BUILDERS

    def get_op_builder(self, class_name: str) -> Any:
        """Return the op builder of that name; NotImplementedBuilder if there is none."""
        return importlib.import_module(_BUILDERS).builder_of(class_name)

    def create_op_builder(self, class_name: str) -> Any:
        """Return an instance of that op builder."""
        return self.get_op_builder(class_name)()

    def build_extension(self) -> Any:
        """Return torch's command class for building extensions."""
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension
