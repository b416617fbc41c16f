"""Masters and optimizer states in files: the disk placement of a bucket (ZeRO-Infinity, Rajbhandari et al. 2021).

Between steps they are not in memory: the master is *hollow* (one NaN in the right shape, as at stage 3), and the
optimizer has no entry for it.  A bucket has two regions of a `DiskStore`: the master, and the tensors of the
optimizer's state one after the other, in the optimizer's own format.  Numbers such as step counts stay in memory.
The second region is allocated after the first step, when the state tensors are known.

`install` makes the optimizer see a bucket in memory, and `write_back` writes and removes it.  Readers between steps
(checkpoints, `safe_get_*`) get `LazyState` objects that decode a part on demand: the protocol of [Note: portable
state] in optimizer_state.py.  The bucket that was read last is cached, so that reading piece by piece reads a file
once.

Writes of a step are valid after `commit`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import attrs
import torch
from torch import Tensor
from torch.nn import Parameter

from zpartition.disk import DiskStore, Region, Transfer
from zpartition.layout.policy import Tier
from zpartition.memory.mover import Mover
from zpartition.state.counts import is_large
from zpartition.state.optimizer_state import elements, set_state_of, state_of

__all__ = ["DiskPlacement", "LazyState", "StateField", "StateStore"]

_LINE_BYTES = 64  # fields begin on cache lines


@attrs.frozen
class StateField:
    """One tensor of an optimizer's state inside its region."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        """Return the tensor inside `memory`, (bytes,) uint8."""
        return memory[self.start : self.start + self.num_bytes].view(self.dtype).view(self.shape)


@attrs.frozen(eq=False)
class BucketMemory:
    """Memory of a bucket while it is loaded."""

    master: Tensor  # (bytes,) uint8
    states: Tensor  # (bytes,) uint8; empty without any


@attrs.define(eq=False)
class StoredState:
    """Description of one bucket's optimizer state on disk."""

    region: Region | None = None  # None: there is no state yet
    fields: tuple[StateField, ...] = ()
    small: dict[str, Any] = attrs.field(factory=dict)  # other items of the optimizer's entry
    kinds: dict[str, Any] = attrs.field(factory=dict)  # portable key -> (dtype, shape), or the number itself

    def copied(self) -> StoredState:
        """Return a copy with its own numbers, because a step changes them in place."""
        small = {key: value.clone() if isinstance(value, Tensor) else value for key, value in self.small.items()}
        kinds = {key: value.clone() if isinstance(value, Tensor) else value for key, value in self.kinds.items()}
        return StoredState(self.region, self.fields, small, kinds)


@final
@attrs.define(eq=False)
class StateStore:
    """One store and the memory that its buckets pass through.  Every buffer fits the largest bucket."""

    store: DiskStore
    mover: Mover
    free: dict[str, list[Tensor]] = attrs.field(factory=lambda: {"master": [], "states": []})
    num_bytes: dict[str, int] = attrs.field(factory=lambda: {"master": 0, "states": 0})  # of the largest bucket
    made_bytes: int = 0  # of all buffers
    region_bytes: dict[str, int] = attrs.field(factory=lambda: {"master": 0, "states": 0})  # on disk, both slots
    cached: tuple[DiskPlacement, BucketMemory] | None = None  # the bucket that was read last, outside of steps

    def allocate(self, kind: str, name: str, num_bytes: int) -> Region:
        """Return the region of this name, allocated if it does not exist; on disk it takes two slots."""
        if (there := self.store.regions.get(name)) is not None:
            return there
        region = self.store.allocate(name, num_bytes)
        self.region_bytes[kind] += 2 * num_bytes
        if num_bytes > self.num_bytes[kind]:
            self.num_bytes[kind] = num_bytes
            self.made_bytes -= sum(buffer.nbytes for buffer in self.free[kind])
            self.free[kind].clear()
        return region

    def acquire(self, kind: str) -> Tensor:
        """Return a buffer for any bucket, until `release`."""
        while self.free[kind]:
            buffer = self.free[kind].pop()
            if buffer.nbytes >= self.num_bytes[kind]:
                return buffer
            self.made_bytes -= buffer.nbytes
        buffer = self.store.buffer(self.num_bytes[kind])
        self.made_bytes += buffer.nbytes
        return buffer

    def release(self, memory: BucketMemory) -> None:
        """Return the buffers of `memory` to the free ones."""
        self.free["master"].append(memory.master)
        if memory.states.numel():
            self.free["states"].append(memory.states)

    def forget(self) -> None:
        """Drop the cached bucket."""
        if self.cached is not None:
            self.release(self.cached[1])
            self.cached = None


@final
@attrs.define(eq=False)
class DiskPlacement:
    """Placement of one bucket in a `StateStore`.

    Invariant: between steps the master is `hollow` and the optimizer has no entry for it.
    """

    disk: StateStore
    index: int  # of the bucket
    tier = Tier.DISK
    _region: Region | None = None  # of the master
    hollow: Tensor = attrs.field(factory=lambda: torch.full((), torch.nan))
    contents: StoredState = attrs.field(factory=StoredState)
    memory: BucketMemory | None = None  # while it is in memory
    staged: Tensor | None = None  # (span numel,) the master while it is loaded, until `publish`

    # -- the master --------------------------------------------------------------------------------

    def adopt(self, master: Parameter) -> None:
        """Allocate the master's region, and free its memory."""
        name = f"master {self.index}"
        self._region = self.disk.allocate("master", name, master.numel() * master.element_size())
        self.hollow = torch.full((), torch.nan, dtype=master.dtype).expand(master.shape)
        master.data = self.hollow

    def refresh(self, master: Parameter, weights: Tensor) -> None:
        self.disk.forget()
        memory = BucketMemory(self.disk.acquire("master"), torch.empty(0, dtype=torch.uint8))
        self._master_in(memory).copy_(weights)
        self._write_master(memory)
        self.disk.release(memory)

    def publish(self, master: Parameter, weights: Tensor) -> None:
        if self.memory is not None:
            self.disk.mover.send(weights, master.data)
            return
        self.flush()
        self.disk.mover.send(weights, self.values(master))

    def values(self, master: Parameter) -> Tensor:
        """Return the master, (span numel,); if read from disk, valid until another bucket is read."""
        if self.memory is not None:
            return master.data
        return self.staged if self.staged is not None else self._master_in(self._read_cached())

    def write(self, master: Parameter, start: int, part: Tensor) -> None:
        if self.staged is not None:
            self.staged[start : start + part.numel()].copy_(part)
            return
        memory = self._read_cached()
        self._master_in(memory)[start : start + part.numel()].copy_(part)
        self._write_master(memory)

    def stage(self) -> Tensor:
        """Return the master in memory, (span numel,), to load into; `publish` writes it to disk."""
        if self.staged is None:
            self.staged = self._master_in(self._read_cached()).clone()
        return self.staged

    def flush(self) -> None:
        """Write a loaded master to disk."""
        if self.staged is not None:
            memory = self._read_cached()
            self._master_in(memory).copy_(self.staged)
            self._write_master(memory)
            self.staged = None

    @property
    def region(self) -> Region:
        """Region of the master."""
        assert self._region is not None
        return self._region

    def _master_in(self, memory: BucketMemory) -> Tensor:
        num_bytes = self.hollow.numel() * self.hollow.element_size()
        return memory.master[:num_bytes].view(self.hollow.dtype)

    def _write_master(self, memory: BucketMemory) -> None:
        self.disk.store.write(self.region, memory.master).wait()
        self.disk.store.commit()

    # -- the optimizer's state ---------------------------------------------------------------------

    def state(self, optimizer: torch.optim.Optimizer, master: Parameter) -> Mapping[str, Any]:
        """Return numbers and lazy states, by key."""
        if self.memory is not None:
            return state_of(optimizer, master)
        kinds = self.contents.kinds.items()
        return {k: LazyState(self, optimizer, master, k, *v) if isinstance(v, tuple) else v for k, v in kinds}

    def set_state(self, optimizer: torch.optim.Optimizer, master: Parameter, state: dict[str, Any]) -> None:
        """Encode the state in memory, then write it."""
        read = {
            key: elements(v, 0, master.numel()).view(v.shape) for key, v in state.items() if isinstance(v, LazyState)
        }
        self.replace(optimizer, master, lambda: set_state_of(optimizer, master, {**state, **read}))

    def clear(self, optimizer: torch.optim.Optimizer, master: Parameter) -> None:
        """Remove the state."""
        if self.contents.fields or self.contents.small:
            self.replace(optimizer, master, functools.partial(optimizer.state.pop, master, None))

    def replace(self, optimizer: torch.optim.Optimizer, master: Parameter, change: Callable[[], object]) -> None:
        """Let `change` alter the optimizer's entry while it is in memory; atomic."""
        before = self.contents
        memory = self._read_cached()
        self.disk.cached = None
        self.install(optimizer, master, memory)
        try:
            change()
            memory, transfers = self.write_back(optimizer, master)
            for transfer in transfers:
                transfer.wait()
            self.disk.store.commit()
            self.disk.release(memory)
        except BaseException:
            self.contents = before
            self.drop(optimizer, master)
            self.disk.store.discard()
            raise

    @contextmanager
    def in_memory(self, optimizer: torch.optim.Optimizer, master: Parameter) -> Iterator[None]:
        """Keep the bucket in memory inside the block, for reading."""
        if self.memory is not None:
            yield
            return
        contents = self.contents
        self.install(optimizer, master, self._read_cached())
        try:
            yield
        finally:
            self.contents = contents
            self._clear(optimizer, master)

    def _read_cached(self) -> BucketMemory:
        cached = self.disk.cached
        if cached is not None and cached[0] is self:
            return cached[1]
        self.disk.forget()
        memory, transfers = self.begin_reading()
        for transfer in transfers:
            transfer.wait()
        self.disk.cached = (self, memory)
        return memory

    # -- a step ------------------------------------------------------------------------------------

    def begin_reading(self) -> tuple[BucketMemory, list[Transfer]]:
        """Allocate memory for the bucket; returns it with the transfers that fill it."""
        disk, contents = self.disk, self.contents
        states = torch.empty(0, dtype=torch.uint8) if contents.region is None else disk.acquire("states")
        memory = BucketMemory(disk.acquire("master"), states)
        transfers = [disk.store.read(self.region, memory.master)]
        if contents.region is not None:
            transfers.append(disk.store.read(contents.region, memory.states))
        return memory, transfers

    def install(self, optimizer: torch.optim.Optimizer | None, master: Parameter, memory: BucketMemory) -> None:
        """Let master and optimizer see `memory`, with copies of the numbers."""
        self.memory, self.contents = memory, self.contents.copied()
        master.data = self._master_in(memory)
        if optimizer is not None and (self.contents.fields or self.contents.small):
            views = {field.key: field.of(memory.states) for field in self.contents.fields}
            optimizer.state[master] = {**self.contents.small, **views}

    def write_back(
        self, optimizer: torch.optim.Optimizer | None, master: Parameter
    ) -> tuple[BucketMemory, list[Transfer]]:
        """Start to write the bucket; the caller waits for the transfers, then releases the memory."""
        assert self.memory is not None
        kinds = {} if optimizer is None else _kinds(state_of(optimizer, master))
        entry = {} if optimizer is None else dict(optimizer.state.get(master, {}))
        memory = self._packed(entry)
        transfers = [self.disk.store.write(self.region, memory.master)]
        if self.contents.region is not None:
            transfers.append(self.disk.store.write(self.contents.region, memory.states))
        self.contents.small = {key: value for key, value in entry.items() if not is_large(key, value)}
        self.contents.kinds = kinds
        self._clear(optimizer, master)
        return memory, transfers

    def restore(self, optimizer: torch.optim.Optimizer | None, master: Parameter, before: StoredState) -> None:
        """Restore the state from before a step that is undone."""
        self.drop(optimizer, master)
        self.contents = before

    def drop(self, optimizer: torch.optim.Optimizer | None, master: Parameter) -> None:
        """Drop the bucket's memory without writing it."""
        if self.memory is not None:
            self.disk.release(self.memory)
        self._clear(optimizer, master)

    def _clear(self, optimizer: torch.optim.Optimizer | None, master: Parameter) -> None:
        self.memory, master.data = None, self.hollow
        if optimizer is not None:
            optimizer.state.pop(master, None)

    def _packed(self, entry: Mapping[str, Any]) -> BucketMemory:
        """Return the memory with every large tensor of `entry` in its field; allocates a region for new fields."""
        assert self.memory is not None
        large = {key: value for key, value in entry.items() if is_large(key, value)}
        fields = _fields(large)
        if fields != self.contents.fields:
            num_bytes = max((field.start + field.num_bytes for field in fields), default=0)
            name = f"states {self.index}, {num_bytes} bytes"  # found again after an undone step
            self.contents.region = self.disk.allocate("states", name, num_bytes) if fields else None
            self.contents.fields = fields
            states = self.disk.acquire("states") if fields else torch.empty(0, dtype=torch.uint8)
            self.memory, left = BucketMemory(self.memory.master, states), self.memory.states
            for field in fields:
                field.of(states).copy_(large[field.key])
            if left.numel():
                self.disk.free["states"].append(left)
            return self.memory
        for field in fields:
            place = field.of(self.memory.states)
            if place.data_ptr() != large[field.key].data_ptr():
                place.copy_(large[field.key])
        return self.memory


@final
@attrs.frozen(eq=False)
class LazyState:
    """One state of one master on disk, read in parts; see [Note: portable state] in optimizer_state.py."""

    placement: DiskPlacement
    optimizer: torch.optim.Optimizer
    master: Parameter
    key: str
    dtype: torch.dtype
    shape: torch.Size

    def read(self, start: int, stop: int) -> Tensor:
        """Return (stop - start,) elements of the flattened state, in new memory."""
        with self.placement.in_memory(self.optimizer, self.master):
            return elements(state_of(self.optimizer, self.master)[self.key], start, stop).clone()


def _fields(large: Mapping[str, Tensor]) -> tuple[StateField, ...]:
    """Return the fields of a state's tensors, one after the other."""
    found: list[StateField] = []
    start = 0
    for key, value in large.items():
        field = StateField(key, value.dtype, tuple(value.shape), start)
        found.append(field)
        start += -(-field.num_bytes // _LINE_BYTES) * _LINE_BYTES
    return tuple(found)


def _kinds(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return (dtype, shape) of the large items of a portable state, and the others unchanged."""
    return {key: (value.dtype, value.shape) if is_large(key, value) else value for key, value in state.items()}
