"""Two-level transport, for a group with ranks on several hosts.

Puts the collectives of `levels.py` on the group's task queue and propagates a failure of one level to the other.  A
rank that dies is noticed by the ranks of its host, which share memory with it, and by the ranks of its index, which
lose a connection.  Each of them aborts the memory of its own host and closes its own connections, so the failure
reaches every rank in one more hop, before any time limit.  The hang detector determines which rank was first; the
errors here name the neighbour that is lost.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import final

import attrs

from zcomm.shared import network
from zcomm.shared.levels import COLLECTIVES, Levels
from zcomm.shared.task_queue import Runner, Step, Task, TaskQueue
from zcomm.shared.transport import Message, Transport

__all__ = ["HierarchicalTransport"]


@final
@attrs.define(eq=False)
class HierarchicalTransport:
    """This rank's end of a two-level group."""

    levels: Levels
    queue: TaskQueue

    @classmethod
    def of(cls, levels: Levels) -> HierarchicalTransport:
        pid = os.getpid()

        def abort_levels() -> None:
            if os.getpid() == pid:
                levels.network.abort()
                levels.memory.abort()

        return cls(levels, TaskQueue(abort_levels))

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
        if self.queue.close("this rank has closed the group."):
            self.levels.network.abort()
        self.memory.close()
        self.queue.join()
        self.levels.network.close()
        self.levels.buffers.clear()
