"""The transport of a group with ranks on several hosts.

It puts the collectives of `levels.py` on the group's lane, and sees to it that a failure of one level reaches the
other.  A rank that dies is noticed by the ranks of its host, who share memory with it, and by the ranks of its index,
who lose a connection.  Either gives up the memory of its own host and closes its own connections, so the news reaches
every rank in one hop more, and nobody waits for a time limit.  Which rank was first is the hang doctor's to find
out; the errors here name the neighbour that is lost.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import final

import attrs

from zcomm.shared.lane import Lane, Step, Task
from zcomm.shared.levels import VERBS, Levels
from zcomm.shared.transport import Message, Transport

__all__ = ["Hierarchy"]


@final
@attrs.define(eq=False)
class Hierarchy:
    """This rank's end of a group in two levels."""

    levels: Levels
    lane: Lane

    @classmethod
    def of(cls, levels: Levels) -> Hierarchy:
        pid = os.getpid()

        def give_up() -> None:
            if os.getpid() == pid:
                levels.network.hang_up()
                levels.memory.give_up()

        return cls(levels, Lane(give_up))

    @property
    def memory(self) -> Transport:
        """Of the ranks of this host."""
        return self.levels.memory

    def issue(self, message: Message) -> Task | None:
        """Put a collective on the lane; None where it is Gloo's to do.  Raises SharedMemoryFailed."""
        verb = VERBS.get(message.op)
        if verb is None:
            return None
        self.memory.check()
        return self.lane.issue(verb(self.levels, message), label=message.label, overlap=message.overlap)

    def issue_here(self, message: Message) -> Task:
        """A collective of this host's ranks alone, in its turn among those of the group."""
        self.memory.check()

        def steps() -> Iterator[Step]:
            yield self.memory.issue(message)

        return self.lane.issue(steps(), label=message.label)

    def told(self) -> tuple[str, str]:
        """What carries the group, and why."""
        places = self.levels.places
        return "shared memory + gloo", (
            f"{places.num_hosts} hosts have {places.num_here} ranks each: shared memory inside a host, Gloo between "
            "hosts; all_to_all over Gloo"
        )

    def close(self) -> None:
        """End the thread, fail what is under way, and let go of both levels.  May be called again.

        In a forked child it does nothing.
        """
        if os.getpid() != self.lane.pid:
            return
        if self.lane.close("this rank has closed the group."):
            self.levels.network.hang_up()
        self.memory.close()
        self.lane.join()
        self.levels.network.close()
        self.levels.buffers.clear()
