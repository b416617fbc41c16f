"""Placement of masters, optimizer states and weights of one bucket between steps.

Masters.  A storage calls its `MasterPlacement` to copy weights into the master (`refresh`) and the master into the
weights (`publish`); a `Holder` calls it for the optimizer's state.  The identity is `ON_DEVICE`: everything is on the
device, as plain tensors, and the master may be the weights themselves.  On disk (disk_states.py) nothing is in memory
between steps, and reading makes a copy.

Parameters.  `own_span` of a `ShardedStorage` is the shard that ranks gather from, and must be on the device for that.
A `ParamPlacement` loads it (`load`) and drops it (`unload`, or `write_back` if it changed).  The identity keeps it on
the device.  A read from disk can begin early: the unsharder knows the next unit.  Files hold the weights once, in the
slot that is written first: no older generation is needed, because masters, which have one, restore the weights.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, final

import attrs
import torch
from torch import Tensor
from torch.nn import Parameter

from zpartition.disk import DiskError, DiskStore, Region, Transfer
from zpartition.layout.policy import Tier
from zpartition.memory.mover import Mover
from zpartition.state.optimizer_state import InOptimizer, StatePlacement

__all__ = [
    "ON_DEVICE",
    "DeviceParams",
    "DevicePlacement",
    "DiskParams",
    "HostParams",
    "HostPlacement",
    "MasterPlacement",
    "ParamPlacement",
    "StagingBuffers",
]


class MasterPlacement(StatePlacement, Protocol):
    """Place of one bucket's master and states."""

    @property
    def tier(self) -> Tier: ...

    def adopt(self, master: Parameter) -> None:
        """Move the memory of a new master here; its contents are undefined until `refresh`."""

    def refresh(self, master: Parameter, weights: Tensor) -> None:
        """Set master = weights, (span numel,) in the parameters' dtype."""

    def publish(self, master: Parameter, weights: Tensor) -> None:
        """Start to set weights = master, cast."""

    def values(self, master: Parameter) -> Tensor:
        """Return the master, (span numel,), for reading: live memory if it is in memory."""

    def write(self, master: Parameter, start: int, part: Tensor) -> None:
        """Set master[start : start + part.numel()] = part."""


def same_bits(first: Tensor, second: Tensor) -> Tensor:
    """Compare the bits of each element, NaN included; both tensors have one dtype."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    return first.view(kind) == second.view(kind)


def refresh_changed(placement: MasterPlacement, master: Parameter, weights: Tensor, unchanged: Tensor) -> None:
    """Set master = weights, (span numel,), except where `unchanged`: there the master keeps its precision."""
    values = placement.values(master)
    placement.refresh(master, torch.where(unchanged.to(values.device), values, weights.to(values)))


class DevicePlacement(InOptimizer):
    """On the device; base class of all placements in memory."""

    tier = Tier.DEVICE

    def adopt(self, master: Parameter) -> None:
        """Do nothing: the master is on the device."""

    def refresh(self, master: Parameter, weights: Tensor) -> None:
        if master.data_ptr() != weights.data_ptr():
            master.data.copy_(weights)

    def publish(self, master: Parameter, weights: Tensor) -> None:
        if master.data_ptr() != weights.data_ptr():
            weights.copy_(master.data)

    def values(self, master: Parameter) -> Tensor:
        return master.data

    def write(self, master: Parameter, start: int, part: Tensor) -> None:
        master.data[start : start + part.numel()].copy_(part)


ON_DEVICE: MasterPlacement = DevicePlacement()


@final
@attrs.define(eq=False)
class HostPlacement(DevicePlacement):
    """In separate CPU memory; torch keeps an optimizer's states beside the master."""

    mover: Mover
    before_access: Callable[[], None] = lambda: None  # rolls back a speculative step, or ends a selective one
    tier = Tier.HOST

    def adopt(self, master: Parameter) -> None:
        master.data = self.mover.empty(master.numel(), master.dtype)

    def refresh(self, master: Parameter, weights: Tensor) -> None:
        self.before_access()
        master.data.copy_(weights)

    def publish(self, master: Parameter, weights: Tensor) -> None:
        self.before_access()
        self.mover.send(weights, master.data)

    def values(self, master: Parameter) -> Tensor:
        self.before_access()
        return master.data

    def write(self, master: Parameter, start: int, part: Tensor) -> None:
        self.before_access()
        super().write(master, start, part)

    def state(self, optimizer: torch.optim.Optimizer, master: Parameter) -> Mapping[str, Any]:
        self.before_access()
        return super().state(optimizer, master)

    def set_state(self, optimizer: torch.optim.Optimizer, master: Parameter, state: dict[str, Any]) -> None:
        self.before_access()
        super().set_state(optimizer, master, state)


class ParamPlacement(Protocol):
    """Place of (span numel,) weights."""

    @property
    def tier(self) -> Tier: ...

    @property
    def num_bytes(self) -> int:
        """Bytes on `tier`."""

    def prefetch(self) -> None:
        """Start to read: the weights are needed soon."""

    def load(self) -> Tensor:
        """Return (span numel,) on the device; the same memory until `unload` or `write_back`."""

    def unload(self) -> None:
        """Drop the unchanged copy on the device."""

    def write_back(self) -> None:
        """Store the changed copy on the device."""

    def publish(self, placement: MasterPlacement, master: Parameter) -> None:
        """Start weights = master, cast."""


@final
@attrs.frozen(eq=False)
class DeviceParams:
    """The identity: weights on the device."""

    span: Tensor
    tier = Tier.DEVICE

    @property
    def num_bytes(self) -> int:
        return self.span.nbytes

    def prefetch(self) -> None: ...

    def load(self) -> Tensor:
        return self.span

    def unload(self) -> None: ...

    def write_back(self) -> None: ...

    def publish(self, placement: MasterPlacement, master: Parameter) -> None:
        placement.publish(master, self.span)


@final
@attrs.define(eq=False)
class HostParams:
    """Weights in CPU memory."""

    mover: Mover
    device: torch.device
    host: Tensor  # (span numel,)
    on_device: Tensor | None = None  # the copy on the device
    tier = Tier.HOST

    @classmethod
    def of(cls, span: Tensor, mover: Mover) -> HostParams:
        """Adopt (span numel,) weights on the device."""
        host = mover.empty(span.numel(), span.dtype)
        host.copy_(span)
        return cls(mover, span.device, host)

    @property
    def num_bytes(self) -> int:
        return self.host.nbytes

    def prefetch(self) -> None: ...

    def load(self) -> Tensor:
        if self.on_device is None:
            self.on_device = torch.empty_like(self.host, device=self.device)
            self.mover.send(self.on_device, self.host)
            self.mover.wait_device()
        return self.on_device

    def unload(self) -> None:
        self.on_device = None

    def write_back(self) -> None:
        if self.on_device is not None:
            self.host.copy_(self.on_device)
            self.on_device = None

    def publish(self, placement: MasterPlacement, master: Parameter) -> None:
        self.host.copy_(placement.values(master))


_numbers = itertools.count()  # of regions: names in a store


@final
@attrs.define(eq=False)
class StagingBuffers:
    """Host memory that weights pass through on their way from and to files.

    Invariant: at most `most_numel` elements are in it, or one shard that is larger.  Reads that are not needed yet
    begin only where there is room; a read that is needed, and a write, wait for writes, and end early reads.
    """

    most_numel: int
    held_numel: int = 0
    writes: collections.deque[DiskParams] = attrs.field(factory=collections.deque)  # in flight, in order of start
    early: list[DiskParams] = attrs.field(factory=list)  # that read ahead, in order of start

    def has_room(self, numel: int) -> bool:
        """Return whether `numel` elements fit now."""
        while self.writes and self.held_numel + numel > self.most_numel and self.writes[0].is_written:
            self.writes[0].finish_write()
        return not self.held_numel or self.held_numel + numel <= self.most_numel

    def make_room(self, numel: int) -> None:
        """Wait until `numel` elements fit."""
        while not self.has_room(numel) and (self.writes or self.early):
            if self.writes:
                self.writes[0].finish_write()
            else:
                self.early[-1].stop_reading()


@final
@attrs.define(eq=False)
class DiskParams:
    """Weights in a file; in CPU memory while it is read or written."""

    store: DiskStore
    mover: Mover
    device: torch.device
    dtype: torch.dtype
    numel: int
    region: Region
    staging: StagingBuffers
    reading: tuple[Tensor, Transfer] | None = None
    writing: Transfer | None = None
    on_device: Tensor | None = None  # the copy on the device
    tier = Tier.DISK

    @classmethod
    def of(cls, span: Tensor, mover: Mover, store: DiskStore, staging: StagingBuffers) -> DiskParams:
        """Adopt (span numel,) weights on the device."""
        region = store.allocate(f"weights {next(_numbers)}", span.nbytes)
        made = cls(store, mover, span.device, span.dtype, span.numel(), region, staging)
        made._write(span)
        return made

    @property
    def num_bytes(self) -> int:
        """Bytes of the region, which has two slots."""
        return 2 * self.region.num_bytes

    def prefetch(self) -> None:
        if self.reading is None and self.on_device is None and self.staging.has_room(self.numel):
            self._begin_reading()

    def load(self) -> Tensor:
        if self.on_device is None:
            if self.reading is None:
                self.staging.make_room(self.numel)
                self._begin_reading()
            assert self.reading is not None
            buffer, transfer = self.reading
            try:
                transfer.wait()
                on_device = torch.empty(self.numel, dtype=self.dtype, device=self.device)
                self.mover.send(on_device, self._values_in(buffer))
                self.mover.wait_device()
            finally:  # after a failure the next `load` reads again
                self._end_reading()
            self.on_device = on_device
        return self.on_device

    def _begin_reading(self) -> None:
        buffer = self.store.buffer(self.region.num_bytes)
        self.reading = (buffer, self.store.read(self.region, buffer))
        self.staging.held_numel += self.numel
        self.staging.early.append(self)

    def _end_reading(self) -> None:
        self.reading = None
        self.staging.held_numel -= self.numel
        self.staging.early.remove(self)

    def stop_reading(self) -> None:
        """Drop what is read ahead, if anything, when it has arrived: `load` reads again."""
        if self.reading is not None:
            with contextlib.suppress(DiskError):
                self.reading[1].wait()
            self._end_reading()

    @property
    def is_written(self) -> bool:
        """True if the last write has ended, successfully or not."""
        return self.writing is None or self.writing.is_done

    def finish_write(self) -> None:
        """Wait for the last write, if any; an error is raised when the weights are read."""
        if self.writing is not None:
            with contextlib.suppress(DiskError):
                self.writing.wait()
            self.writing = None
            self.staging.held_numel -= self.numel
            self.staging.writes.remove(self)

    def unload(self) -> None:
        self.on_device = None

    def write_back(self) -> None:
        if self.on_device is not None:
            self._write(self.on_device)
            self.on_device = None

    def publish(self, placement: MasterPlacement, master: Parameter) -> None:
        self._write(placement.values(master))

    def _write(self, values: Tensor) -> None:
        """Start to write; an error is raised when the weights are read.

        Transfers in flight are outdated: once they are over, their result is ignored.
        """
        self.finish_write()
        self.stop_reading()
        self.staging.make_room(self.numel)
        buffer = self.store.buffer(self.region.num_bytes)
        self._values_in(buffer).copy_(values)
        self.writing = self.store.write(self.region, buffer)
        self.staging.held_numel += self.numel
        self.staging.writes.append(self)

    def _values_in(self, buffer: Tensor) -> Tensor:
        return buffer[: self.region.num_bytes].view(self.dtype)
