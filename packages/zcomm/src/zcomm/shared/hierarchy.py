"""Two-level transport, for a group with ranks on several hosts.

Puts the collectives of `levels.py` on the group's task queue and propagates a failure of one level to the other.  A
rank that dies is noticed by the ranks of its host, which share memory with it, and by the ranks of its index, which
lose a connection.  Each of them aborts the memory of its own host and closes its own connections, so the failure
reaches every rank in one more hop, before any time limit.  The hang detector determines which rank was first; the
errors here name the neighbour that is lost.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Iterator
from typing import Any, final

import attrs
from torch import Tensor

from zcomm import compat
from zcomm.shared import network
from zcomm.shared.levels import COLLECTIVES, Levels
from zcomm.shared.task_queue import Runner, Step, Task, TaskQueue
from zcomm.shared.transport import Message, Transport

__all__ = ["HierarchicalTransport"]


OVERLAPPING = ("all_reduce", "reduce_scatter", "all_gather")  # collectives that send nothing but tagged messages
_MESSAGES = 1000  # tags of one collective; a longer one uses them again, in order


@final
@attrs.frozen(eq=False)
class Lane:
    """Every other long collective of a group without a first level.

    Two collectives are in flight at once, so that the wire is not idle while a thread wakes up to add what has
    arrived.  Their messages have tags, because the ranks may send them in different orders.
    """

    queue: TaskQueue
    buffers: dict[Any, Tensor] = attrs.field(factory=dict)

    def issue(self, levels: Levels, message: Message, number: int) -> Task:
        """Queue the collective `number` of the group's long ones.  Raises SharedMemoryFailed."""
        first = number % (compat.NUM_LINK_TAGS // _MESSAGES) * _MESSAGES
        tags = itertools.cycle(range(first, first + _MESSAGES))
        steps = COLLECTIVES[message.op](attrs.evolve(levels, buffers=self.buffers, tags=tags), message)
        return self.queue.issue(steps, label=message.label, overlap=message.overlap, runner=Runner.THREAD)


@final
@attrs.define(eq=False)
class HierarchicalTransport:
    """This rank's end of a two-level group."""

    levels: Levels
    queue: TaskQueue
    lanes: tuple[Lane, Lane]  # for long collectives, if each rank is on a host of its own
    num_long: int = 0  # collectives in lanes so far, equal on all ranks
    lock: threading.Lock = attrs.field(factory=threading.Lock)  # makes the order of issue that of the numbers

    @classmethod
    def of(cls, levels: Levels) -> HierarchicalTransport:
        pid = os.getpid()
        queues: list[TaskQueue] = []

        def abort_from(number: int) -> None:
            if os.getpid() != pid:
                return
            levels.network.abort()
            levels.memory.abort()
            for queue in queues[:number] + queues[number + 1 :]:
                queue.close("another collective of the group has failed.")

        queues += [TaskQueue(functools.partial(abort_from, number)) for number in range(3)]
        return cls(levels, queues[0], (Lane(queues[1]), Lane(queues[2])))

    @property
    def memory(self) -> Transport:
        """Transport of the ranks of this host."""
        return self.levels.memory

    def issue(self, message: Message) -> Task | None:
        """Queue a collective; return None if Gloo carries it.  Raises SharedMemoryFailed."""
        verb = COLLECTIVES.get(message.op)
        if verb is None:
            return None
        self.memory.check()
        if self.levels.is_alone and message.op in OVERLAPPING and message.nbytes > network.LONG_BYTES:
            with self.lock:
                self.num_long += 1
                return self.lanes[self.num_long % 2].issue(self.levels, message, self.num_long)
        return self.queue.issue(
            verb(self.levels, message),
            label=message.label,
            overlap=message.overlap,
            runner=Runner.THREAD if message.nbytes > network.LONG_BYTES else Runner.WAITER,
        )

    def issue_on_host(self, message: Message) -> Task:
        """Queue a collective of this host's ranks, in order with those of the group."""
        self.memory.check()

        def steps() -> Iterator[Step]:
            yield self.memory.issue(message)

        return self.queue.issue(steps(), label=message.label)

    def describe(self) -> tuple[str, str]:
        """Return the transport's name and the reason for it."""
        layout = self.levels.layout
        if alone := layout.shares_nothing():
            return "gloo", f"{alone}: exchanged over Gloo and added in the order of the ranks"
        return "shared memory + gloo", (
            f"{layout.num_hosts} hosts have {layout.ranks_per_host} ranks each: shared memory inside a host, Gloo "
            "between hosts; all_to_all over Gloo"
        )

    def close(self) -> None:
        """End the thread, fail what is in flight, and release both levels.  May be called again.

        Does nothing in a forked child.
        """
        if os.getpid() != self.queue.pid:
            return
        queues = [self.queue, *(lane.queue for lane in self.lanes)]
        were_busy = [queue.close("this rank has closed the group.") for queue in queues]
        if any(were_busy):
            self.levels.network.abort()
        self.memory.close()
        for queue in queues:
            queue.join()
        self.levels.network.close()
        for buffers in (self.levels.buffers, *(lane.buffers for lane in self.lanes)):
            buffers.clear()
