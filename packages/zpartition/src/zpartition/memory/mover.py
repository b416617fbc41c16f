"""Copies between the device and the host: the interface between CPU tests and GPU runs.

A `Mover` starts copies and reports when they are complete.  On a CPU a copy is synchronous (`PlainMover`).  On CUDA
(`CudaMover`) it runs on its own stream, from and to pinned memory, so that neither the host nor the compute stream
waits for it:

    fetch, add : device -> host, on the stream `down`; the host waits for all of them once, before it reads
    send       : host -> device, on the stream `up`; the current stream waits for all of them once, before it reads

Rules for correctness: a side stream first waits for the current stream (which writes, or still reads, the device
side); a temporary that a side stream reads is recorded on it, so that the caching allocator does not reuse it early;
the host writes pinned memory only after the last copy out of it.  At most `IN_FLIGHT` temporaries wait at once, which
bounds their memory when the bus is slower than backward.

Rejected: copying straight from the reduced bucket.  It returns to its pool at once and is filled again, so the pool
would have to know streams; and it has the wire dtype, which would have to be widened on the host.
"""

from __future__ import annotations

import collections
from typing import Any, Protocol, final

import attrs
import torch
from torch import Tensor

from zpartition.layout.policy import Offload

__all__ = ["IN_FLIGHT", "NUM_STAGES", "CudaMover", "Mover", "PlainMover", "make_mover"]

IN_FLIGHT = 4  # device temporaries that wait for the bus at once, beside the one that is being made
NUM_STAGES = 2  # pieces of pinned memory that sends pass through


class Mover(Protocol):
    """Starts copies between one device and the host."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate host memory with fast copies; contents undefined."""

    def fetch(self, host: Tensor, device: Tensor, factor: float) -> None:
        """Start host = factor * device, in the dtype of `host`."""

    def add(self, host: Tensor, device: Tensor, factor: float) -> None:
        """Start host += factor * device."""

    def send(self, device: Tensor, host: Tensor) -> None:
        """Start device = host, cast to the dtype of `device`; `host` may be written once this returns."""

    def ready(self) -> Any:
        """Return a mark behind all copies started so far, for `wait_for` in any thread."""

    def wait_for(self, mark: Any) -> None:
        """Wait until the host may read copies started before the mark."""

    def wait_host(self) -> None:
        """Wait until the host may read all fetched values."""

    def wait_device(self) -> None:
        """Make the current stream wait for all sent values."""

    @property
    def staging_bytes(self) -> int:
        """Host memory that copies pass through."""

    @property
    def in_flight_bytes(self) -> int:
        """Device memory of temporaries that may still be on their way to the host."""


@final
@attrs.frozen
class PlainMover:
    """Mover of a CPU module: copies are synchronous."""

    staging_bytes: int = 0
    in_flight_bytes: int = 0

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate (numel,) zeros, so that no page is first touched in a step."""
        return torch.zeros(numel, dtype=dtype)

    def fetch(self, host: Tensor, device: Tensor, factor: float) -> None:
        host.copy_(device)
        if factor != 1.0:
            host.mul_(factor)

    def add(self, host: Tensor, device: Tensor, factor: float) -> None:
        host.add_(device, alpha=factor)

    def send(self, device: Tensor, host: Tensor) -> None:
        device.copy_(host)

    def ready(self) -> None:
        return None

    def wait_for(self, mark: Any) -> None: ...

    def wait_host(self) -> None: ...

    def wait_device(self) -> None: ...


@attrs.define(eq=False)
class _Stage:
    """Pinned memory that one `send` passes through."""

    memory: Tensor  # (bytes,) uint8, pinned
    free: Any  # event: the last copy out of it is over


@final
@attrs.define(eq=False)
class CudaMover:
    """Mover of a GPU module; see the rules above."""

    device: torch.device
    pin: bool
    down: Any  # torch.cuda.Stream
    up: Any  # torch.cuda.Stream
    in_flight: collections.deque[tuple[Any, int]] = attrs.field(factory=collections.deque)  # (event behind it, bytes)
    stages: list[_Stage] = attrs.field(factory=list)  # used in turn
    stage_bytes: int = 0  # of each: the most that was ever sent at once
    _turn: int = 1  # of `stages`, the one used last

    @classmethod
    def create(cls, device: torch.device, pin: bool) -> CudaMover:
        """Create the mover with two streams on `device`."""
        return cls(device, pin, _cuda().Stream(device), _cuda().Stream(device))

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate (numel,) zeros, pinned if the policy says so."""
        return torch.zeros(numel, dtype=dtype, pin_memory=self.pin)

    def fetch(self, host: Tensor, device: Tensor, factor: float) -> None:
        """Widen on the device, on the current stream; copy on the side stream."""
        values = torch.empty_like(device, dtype=host.dtype)
        values.copy_(device)
        if factor != 1.0:
            values.mul_(factor)
        self._begin_down(values)
        with torch.cuda.stream(self.down):
            host.copy_(values, non_blocking=True)
        self._end_down(values.nbytes)

    def add(self, host: Tensor, device: Tensor, factor: float) -> None:
        """Fetch the host's values, add on the device, and copy the sum back; both directions of the bus overlap."""
        values = device.clone()  # the bucket returns to its pool
        self._begin_down(values)
        with torch.cuda.stream(self.down):
            total = torch.empty_like(values, dtype=host.dtype)
            total.copy_(host, non_blocking=True)
            total.add_(values, alpha=factor)
            host.copy_(total, non_blocking=True)
        self._end_down(values.nbytes)

    def _begin_down(self, values: Tensor) -> None:
        while len(self.in_flight) >= IN_FLIGHT:
            self.in_flight.popleft()[0].synchronize()
        self.down.wait_stream(torch.cuda.current_stream(self.device))
        values.record_stream(self.down)

    def _end_down(self, num_bytes: int) -> None:
        self.in_flight.append((self.down.record_event(), num_bytes))

    def send(self, device: Tensor, host: Tensor) -> None:
        """Cast on the host into pinned memory; copy on the side stream."""
        stage = self._stage(host.numel() * device.element_size())
        values = stage.memory[: device.nbytes].view(device.dtype)
        values.copy_(host)
        self.up.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.up):
            device.copy_(values, non_blocking=True)
            stage.free = self.up.record_event()

    def _stage(self, num_bytes: int) -> _Stage:
        """Return one of two stages, grown to the largest send so far; waits for the copy before the last one."""
        self.stage_bytes = max(self.stage_bytes, num_bytes)
        if len(self.stages) < NUM_STAGES:
            self.stages.append(_Stage(self.empty(self.stage_bytes, torch.uint8), _cuda().Event()))
            return self.stages[-1]
        self._turn = 1 - self._turn
        stage = self.stages[self._turn]
        stage.free.synchronize()
        if stage.memory.numel() < self.stage_bytes:
            stage.memory = self.empty(self.stage_bytes, torch.uint8)
        return stage

    def ready(self) -> Any:
        return self.down.record_event()

    def wait_for(self, mark: Any) -> None:
        mark.synchronize()

    def wait_host(self) -> None:
        if self.in_flight:  # a wait without a reason would drain the device in every step without offload
            self.down.synchronize()
            self.in_flight.clear()

    def wait_device(self) -> None:
        if self.stages:  # something was sent: a stream that is captured must not wait for another
            torch.cuda.current_stream(self.device).wait_stream(self.up)

    @property
    def staging_bytes(self) -> int:
        return sum(stage.memory.nbytes for stage in self.stages)

    @property
    def in_flight_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.in_flight)


def _cuda() -> Any:
    """Return torch.cuda, whose classes are not typed."""
    return torch.cuda


def make_mover(device: torch.device, offload: Offload) -> Mover:
    """Return the mover for a module on `device`."""
    return CudaMover.create(device, offload.pin) if device.type == "cuda" else PlainMover()
