"""torch.cuda over the simulated device: the bindings that a CPU wheel lacks.

Most of torch.cuda is Python over `torch._C._cuda_*`.  Those functions are supplied here, so that its own code runs:
lazy initialization, stream contexts, memory statistics, random state, graphs.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from simulated_cuda.library import host_access, library, stats

__all__ = ["CAPABILITY", "NAME", "TOTAL_MEMORY", "install"]

NAME = "Simulated CUDA"
CAPABILITY = (9, 0)
TOTAL_MEMORY = 80 * 2**30
CUDA_TYPE = 1  # c10::DeviceType::CUDA


class Stream(torch.Stream):
    """torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" in kwargs:
            made = super().__new__(cls, **{**kwargs, "device_index": 0, "device_type": CUDA_TYPE})
        else:
            made = super().__new__(cls, device="cuda:0", priority=priority)
        assert isinstance(made, Stream)
        return made

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    @property
    def _as_parameter_(self) -> int:
        return self.stream_id

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device=cuda:0 simulated={self.stream_id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and self.stream_id == other.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)


class Event(torch.Event):
    """torch.cuda.Event."""

    _timer: torch.Event | None  # recorded with this event; None without timing

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> Event:
        made = super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)
        assert isinstance(made, Event)
        # torch.Event.elapsed_time takes no subclass
        made._timer = torch.Event(device="cuda", enable_timing=True) if enable_timing else None
        return made

    def record(self, stream: Any = None) -> None:
        stream = torch.cuda.current_stream() if stream is None else stream
        if self._timer is not None:
            self._timer.record(stream)
        super().record(stream)

    def elapsed_time(self, end_event: Any) -> float:
        if self._timer is None or end_event._timer is None:
            raise RuntimeError("simulated CUDA: elapsed_time of an event without enable_timing=True")
        return self._timer.elapsed_time(end_event._timer)

    def wait(self, stream: Any = None) -> None:
        super().wait(torch.cuda.current_stream() if stream is None else stream)


class CUDAGraph:
    """torch.cuda.CUDAGraph: a recorder of launches."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._graph = library().sim_new_graph()
        self._is_captured = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_: Any) -> None:
        if torch.cuda.current_stream().stream_id == 0:
            raise RuntimeError("simulated CUDA: the default stream cannot be captured; use torch.cuda.graph")
        library().sim_begin_capture(self._graph)

    def capture_end(self) -> None:
        library().sim_end_capture()
        self._is_captured = True

    def replay(self) -> None:
        if not self._is_captured:
            raise RuntimeError("simulated CUDA: replay() of a graph that is not captured")
        library().sim_replay(self._graph)

    def instantiate(self) -> None: ...

    def reset(self) -> None:
        library().sim_delete_graph(self._graph)
        self._graph = library().sim_new_graph()
        self._is_captured = False

    def pool(self) -> tuple[int, int]:
        return (0, 0)


def _runtime() -> types.SimpleNamespace:
    """Return the functions of the CUDA runtime that torch.cuda and its callers use."""
    return types.SimpleNamespace(
        cudaError=types.SimpleNamespace(success=0),
        cudaMemGetInfo=lambda device: (TOTAL_MEMORY - stats()["reserved"], TOTAL_MEMORY),
        cudaHostRegister=lambda address, num_bytes, flags: 0,
        cudaHostUnregister=lambda address: 0,
        cudaGetErrorString=lambda error: f"simulated error {error}",
        cudaProfilerStart=lambda: 0,
        cudaProfilerStop=lambda: 0,
    )


def _memory_stats(device: int) -> dict[str, Any]:
    now = stats()

    def stat(current: int, peak: int) -> dict[str, dict[str, int]]:
        value = {"current": current, "peak": peak, "allocated": current, "freed": 0}
        return {pool: dict(value) for pool in ("all", "small_pool", "large_pool")}

    names = ("allocated_bytes", "active_bytes", "requested_bytes")
    both = {name: stat(now["allocated"], now["peak_allocated"]) for name in names}
    reserved = stat(now["reserved"], now["peak_reserved"])
    blocks = {name: stat(now["num_allocations"], now["num_allocations"]) for name in ("allocation", "active")}
    return {**both, **blocks, "reserved_bytes": reserved, "num_alloc_retries": 0, "num_ooms": 0}


def _set_device(device: int) -> None:
    if device > 0:
        raise RuntimeError(f"simulated CUDA: there is one device, cuda:0; got {device}")


def _exchange_device(device: int) -> int:
    _set_device(device)
    return 0


def _maybe_exchange_device(device: int) -> int:  # another object than the one above: torch._dynamo asks for two
    return _exchange_device(device)


def _initialize() -> None:
    """Hand torch.cuda the device's default generator; called once, at the first use."""
    library().sim_hand_out_default_generator()
    torch.cuda.default_generators = (torch.Generator(device="cuda"),)


def _properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=TOTAL_MEMORY,
        multi_processor_count=132,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 * 2**20,
        is_integrated=0,
        gcnArchName="",
        uuid="simulated",
    )


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    library().sim_set_stream(stream_id)


def _bindings() -> dict[str, Any]:
    """Return the functions of torch._C that a CPU wheel lacks; Python's own, since torch._dynamo hashes them."""
    sim = library()
    return {
        "_has_cuda": True,
        "_cuda_init": _initialize,
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": _set_device,
        "_cuda_exchangeDevice": _exchange_device,
        "_cuda_maybeExchangeDevice": _maybe_exchange_device,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_canDeviceAccessPeer": lambda device, peer: False,
        "_cuda_getArchFlags": lambda: f"sm_{CAPABILITY[0]}{CAPABILITY[1]}",
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_synchronize": lambda: sim.sim_synchronize(),
        "_cuda_getCurrentStream": lambda device: (sim.sim_current_stream(), 0, CUDA_TYPE),
        "_cuda_getCurrentRawStream": lambda device: sim.sim_current_stream(),
        "_cuda_getDefaultStream": lambda device: (0, 0, CUDA_TYPE),
        "_cuda_setStream": _set_stream,
        "_cuda_memoryStats": _memory_stats,
        "_cuda_resetPeakMemoryStats": lambda device: sim.sim_reset_peak(),
        "_cuda_resetAccumulatedMemoryStats": lambda device: None,
        "_cuda_emptyCache": lambda *_: sim.sim_empty_cache(),
        "_cuda_memorySnapshot": lambda *_: {"segments": [], "device_traces": [[]], "allocator_settings": {}},
        "_cuda_record_memory_history": lambda *_, **__: None,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_ipc_collect": lambda: None,
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_set_sync_debug_mode": lambda mode: None,
        "_cuda_hostMemoryStats": dict,
        "_cuda_sleep": lambda cycles: None,
        "_host_emptyCache": lambda: None,
        "_cuda_clearCublasWorkspaces": lambda: None,
    }


def _watch_numpy() -> None:
    """Count `Tensor.numpy()` of pinned memory as a write of the host, since an array gives both."""
    plain = torch.Tensor.numpy

    def numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "cpu" and self.nbytes:
            host_access(self.data_ptr(), self.nbytes, True, "numpy()")
        return plain(self, *args, **kwargs)

    torch.Tensor.numpy = numpy  # type: ignore[method-assign,assignment]


def install() -> None:
    """Give torch.cuda its device; torch must have been imported with the library loaded."""
    for name, value in _bindings().items():
        setattr(torch._C, name, value)
    _watch_numpy()
    sim = library()
    torch.version.cuda = "13.0"
    cuda: Any = torch.cuda
    cuda._cudart = _runtime()
    cuda._exchange_device, cuda._maybe_exchange_device = _exchange_device, _maybe_exchange_device
    cuda._get_device_properties = _properties
    cuda.check_error = lambda error: None
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event
    cuda.CUDAGraph = cuda.graphs.CUDAGraph = CUDAGraph
    cuda.graphs._cuda_isCurrentStreamCapturing = lambda: sim.sim_is_capturing()
    cuda.graphs._graph_pool_handle = lambda: (0, 0)
    cuda.nccl.version = lambda: (2, 27, 3)
