"""One update of states that are on disk: three groups in memory at once, and all of it or nothing.

    read i + 1  |  step i  |  write i - 1

The transfers run on the store's threads while the optimizer steps.  Nothing counts before all ranks have said that
theirs is written: a rank whose disk is full, or whose file is damaged, makes all of them keep the generation before,
and each says whose fault it was.  The buckets on the device are stepped after that, so they are not touched either.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import attrs
import torch
from torch.distributed import ProcessGroup
from torch.nn import Parameter

import zcomm
from zpartition.disk import Transfer
from zpartition.disk_states import Contents, Disk, Memory, OnDisk

__all__ = ["DiskStep"]

_Going = list[tuple[Memory, list[Transfer]]]


@final
@attrs.define(eq=False)
class DiskStep:
    """The groups of one update on their way through memory.

    Invariant: at most `buffer_count` groups have memory: one that is read, one that is stepped, the rest written.
    """

    disk: Disk
    homes: Mapping[int, OnDisk]  # by bucket index
    masters: Sequence[Parameter]  # of all buckets
    optimizer: torch.optim.Optimizer | None
    buffer_count: int
    before: dict[int, Contents] = attrs.field(factory=dict)  # what is to be put back if this is undone
    reading: _Going = attrs.field(factory=list)
    writing: collections.deque[_Going] = attrs.field(factory=collections.deque)

    def visit(self, groups: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
        """Each group while it is in memory; when this is over, all is written, and a commit is a rename away."""
        self.disk.forget()
        for home in self.homes.values():
            home.flush()
        self._read(groups[:1])
        for position, group in enumerate(groups):
            self._install(group)
            self._read(groups[position + 1 : position + 2])
            yield group
            self.writing.append([])
            for index in group:
                self.writing[-1].append(self.homes[index].put_back(self.optimizer, self.masters[index]))
        self._wait_for_writes(0)
        self.disk.store.prepare()

    def _read(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Start to read the group, if there is one, once there is room."""
        self._wait_for_writes(self.buffer_count - 2)
        self.reading = [self.homes[index].begin_reading() for group in groups for index in group]

    def _install(self, group: tuple[int, ...]) -> None:
        for index in group:
            memory, transfers = self.reading[0]
            for transfer in transfers:
                transfer.wait()
            self.before[index] = self.homes[index].contents
            self.homes[index].install(self.optimizer, self.masters[index], memory)
            self.reading.pop(0)

    def _wait_for_writes(self, leave: int) -> None:
        while len(self.writing) > leave:
            for _, transfers in self.writing[0]:
                for transfer in transfers:
                    transfer.wait()
            for memory, _ in self.writing.popleft():
                self.disk.give_back(memory)

    def agree(self, problem: Exception | None, group: ProcessGroup | None) -> None:
        """Commit if no rank has a problem; else undo here, and raise.  A collective.

        Raises:
            problem, if there is one; RuntimeError for that of another rank.
        """
        told = zcomm.exchange("" if problem is None else f"{type(problem).__name__}: {problem}", group)
        if not any(told):
            self.disk.store.commit()
            return
        self.undo()
        if problem is not None:
            raise problem
        rank = next(index for index, text in enumerate(told) if text)
        raise RuntimeError(
            f"rank {rank} could not update its states on disk, so no rank has: weights and states are those from "
            f"before the step. {told[rank]}"
        )

    def undo(self) -> None:
        """Forget what was written; states and numbers are those from before."""
        for memory, transfers in [*self.reading, *(each for going in self.writing for each in going)]:
            for transfer in transfers:
                with contextlib.suppress(Exception):  # the first failure is told, these are its consequences
                    transfer.wait()
            self.disk.give_back(memory)
        self.reading, self.writing = [], collections.deque()
        for index, contents in self.before.items():
            self.homes[index].put_out(self.optimizer, self.masters[index], contents)
        self.disk.store.discard()
