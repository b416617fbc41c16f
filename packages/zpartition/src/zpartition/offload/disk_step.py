"""Disk step: one atomic update of states on disk, with three groups in memory at once.  State dicts of such states.

    read i + 1  |  step i  |  write i - 1

The transfers run on the store's threads while the optimizer steps.  The update is committed when all ranks have
written theirs: if the disk of a rank is full, or its file is damaged, all ranks keep the previous generation and
raise an error that names the rank.  Buckets on the device are stepped afterwards, so they are unchanged, too.

State dicts.  torch builds and loads them from `optimizer.state`, which has no entries for states on disk between
steps.  So hooks insert copies before a state dict is built, remove them afterwards, and write loaded entries to disk.
All states of a rank are in memory while a state dict exists; `state_shards` needs a bucket at a time.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

import zcomm
from zpartition.disk import Transfer
from zpartition.offload.disk_states import BucketMemory, DiskPlacement, StateStore, StoredState

__all__ = ["DiskStep", "hook_dicts"]

_InFlight = list[tuple[BucketMemory, list[Transfer]]]


@final
@attrs.define(eq=False)
class DiskStep:
    """The groups of one update while they pass through memory.

    Invariant: at most `buffer_count` groups have memory: one is read, one is stepped, the rest are written.
    """

    disk: StateStore
    placements: Mapping[int, DiskPlacement]  # by bucket index
    masters: Sequence[Parameter]  # of all buckets
    optimizer: torch.optim.Optimizer | None
    buffer_count: int
    before: dict[int, StoredState] = attrs.field(factory=dict)  # for `undo`, by bucket index
    reading: _InFlight = attrs.field(factory=list)
    writing: collections.deque[_InFlight] = attrs.field(factory=collections.deque)

    def visit(self, groups: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
        """Yield each group while it is in memory; at the end all is written, and only a rename is left to commit."""
        self.disk.forget()
        for placement in self.placements.values():
            placement.flush()
        self._read(groups[:1])
        for position, group in enumerate(groups):
            self._install(group)
            self._read(groups[position + 1 : position + 2])
            yield group
            self.writing.append([])
            for index in group:
                self.writing[-1].append(self.placements[index].write_back(self.optimizer, self.masters[index]))
        self._wait_for_writes(0)
        self.disk.store.prepare()

    def _read(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Start to read the group, if any, when there is room."""
        self._wait_for_writes(self.buffer_count - 2)
        self.reading = [self.placements[index].begin_reading() for group in groups for index in group]

    def _install(self, group: tuple[int, ...]) -> None:
        for index in group:
            memory, transfers = self.reading[0]
            for transfer in transfers:
                transfer.wait()
            self.before[index] = self.placements[index].contents
            self.placements[index].install(self.optimizer, self.masters[index], memory)
            self.reading.pop(0)

    def _wait_for_writes(self, leave: int) -> None:
        while len(self.writing) > leave:
            for _, transfers in self.writing[0]:
                for transfer in transfers:
                    transfer.wait()
            for memory, _ in self.writing.popleft():
                self.disk.release(memory)

    def commit_or_undo(self, problem: Exception | None, group: ProcessGroup | None) -> None:
        """Commit if no rank has a problem; else undo, and raise.  A collective.

        Raises:
            `problem`, if given; RuntimeError if another rank has one.
        """
        errors = zcomm.all_gather_object("" if problem is None else f"{type(problem).__name__}: {problem}", group)
        if not any(errors):
            self.disk.store.commit()
            return
        self.undo()
        if problem is not None:
            raise problem
        rank = next(index for index, text in enumerate(errors) if text)
        raise RuntimeError(
            f"rank {rank} could not update its states on disk, so all ranks keep the weights and states from before "
            f"the step: {errors[rank]}"
        )

    def undo(self) -> None:
        """Discard all writes; states and counters are those from before the step."""
        for memory, transfers in [*self.reading, *(each for group in self.writing for each in group)]:
            for transfer in transfers:
                with contextlib.suppress(Exception):  # only the first failure is raised
                    transfer.wait()
            self.disk.release(memory)
        self.reading, self.writing = [], collections.deque()
        for index, contents in self.before.items():
            self.placements[index].restore(self.optimizer, self.masters[index], contents)
        self.disk.store.discard()


def hook_dicts(
    optimizer: torch.optim.Optimizer, places: Sequence[tuple[DiskPlacement, Parameter]]
) -> list[RemovableHandle]:
    """Let `state_dict` and `load_state_dict` of `optimizer` include the states of `places`; returns the hooks."""

    def fill(_: torch.optim.Optimizer) -> None:
        copies: dict[Parameter, dict[str, Any]] = {}
        for placement, master in places:
            with placement.in_memory(optimizer, master):
                entry = optimizer.state.get(master)
                copies[master] = {key: _copied(value) for key, value in (entry or {}).items()}
        optimizer.state.update({master: entry for master, entry in copies.items() if entry})

    def empty(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        for _placement, master in places:
            optimizer.state.pop(master, None)

    def adopt(_: torch.optim.Optimizer) -> None:
        for placement, master in places:
            entry = optimizer.state.pop(master, None)
            if entry:
                placement.replace(optimizer, master, functools.partial(optimizer.state.update, {master: entry}))
            else:  # the loaded state dict has no entry
                placement.clear(optimizer, master)

    return [
        optimizer.register_state_dict_pre_hook(fill),
        optimizer.register_state_dict_post_hook(empty),
        optimizer.register_load_state_dict_post_hook(adopt),
    ]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
