"""One update of states that are on disk: three groups in memory at once, and all of it or nothing.

    read i + 1  |  step i  |  write i - 1

The transfers run on the store's threads while the optimizer steps.  Nothing counts before all ranks have said that
theirs is written: a rank whose disk is full, or whose file is damaged, makes all of them keep the generation before,
and each says whose fault it was.  The buckets on the device are stepped after that, so they are not touched either.
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

_Going = list[tuple[BucketMemory, list[Transfer]]]


@final
@attrs.define(eq=False)
class DiskStep:
    """The groups of one update on their way through memory.

    Invariant: at most `buffer_count` groups have memory: one that is read, one that is stepped, the rest written.
    """

    disk: StateStore
    placements: Mapping[int, DiskPlacement]  # by bucket index
    masters: Sequence[Parameter]  # of all buckets
    optimizer: torch.optim.Optimizer | None
    buffer_count: int
    before: dict[int, StoredState] = attrs.field(factory=dict)  # what is to be put back if this is undone
    reading: _Going = attrs.field(factory=list)
    writing: collections.deque[_Going] = attrs.field(factory=collections.deque)

    def visit(self, groups: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
        """Each group while it is in memory; when this is over, all is written, and a commit is a rename away."""
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
        """Start to read the group, if there is one, once there is room."""
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

    def agree(self, problem: Exception | None, group: ProcessGroup | None) -> None:
        """Commit if no rank has a problem; else undo here, and raise.  A collective.

        Raises:
            problem, if there is one; RuntimeError for that of another rank.
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
            f"rank {rank} could not update its states on disk, so no rank has: weights and states are those from "
            f"before the step. {errors[rank]}"
        )

    def undo(self) -> None:
        """Forget what was written; states and numbers are those from before."""
        for memory, transfers in [*self.reading, *(each for going in self.writing for each in going)]:
            for transfer in transfers:
                with contextlib.suppress(Exception):  # the first failure is told, these are its consequences
                    transfer.wait()
            self.disk.release(memory)
        self.reading, self.writing = [], collections.deque()
        for index, contents in self.before.items():
            self.placements[index].restore(self.optimizer, self.masters[index], contents)
        self.disk.store.discard()


# State dicts of an optimizer whose states are on disk: whole, as if they were in memory.
#
# torch builds and loads them from `optimizer.state`, where nothing is between steps.  So hooks put copies there
# before
# a state dict is built, take them away afterwards, and take to disk what has been loaded.  All states of a rank are
# in
# memory while somebody holds the state dict; `state_shards` needs a bucket at a time.


def hook_dicts(
    optimizer: torch.optim.Optimizer, places: Sequence[tuple[DiskPlacement, Parameter]]
) -> list[RemovableHandle]:
    """Let `state_dict` and `load_state_dict` of `optimizer` see the masters of `places`; returns the hooks."""

    def fill(_: torch.optim.Optimizer) -> None:
        copies: dict[Parameter, dict[str, Any]] = {}
        for placement, master in places:
            with placement.in_memory(optimizer, master):
                entry = optimizer.state.get(master)
                copies[master] = {key: _copied(value) for key, value in (entry or {}).items()}
        optimizer.state.update({master: entry for master, entry in copies.items() if entry})

    def empty(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        for _home, master in places:
            optimizer.state.pop(master, None)

    def adopt(_: torch.optim.Optimizer) -> None:
        for placement, master in places:
            entry = optimizer.state.pop(master, None)
            if entry:
                placement.replace(optimizer, master, functools.partial(optimizer.state.update, {master: entry}))
            else:  # what is loaded has none
                placement.clear(optimizer, master)

    return [
        optimizer.register_state_dict_pre_hook(fill),
        optimizer.register_state_dict_post_hook(empty),
        optimizer.register_load_state_dict_post_hook(adopt),
    ]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
