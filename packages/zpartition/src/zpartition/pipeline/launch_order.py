"""Order of launches: when each rank sends and receives, agreed before a batch.

Problem.  A GPU executes the messages of a communicator one after the other, and each occupies it until the other rank
has come to it, too.  If two stages each send to the other first, both wait forever.  Two communicators, one for each
direction, avoid this only if the kernels of both fit on the device at once, which NCCL does not promise.

Design.  A schedule is known to all ranks, so every rank derives from it the launches of all: groups of messages, of
which each is one NCCL group (one kernel, whose messages proceed in any order).  `simulate` tells when each action
ends if no message takes time.  A message has a *level*, the time at which it is exchanged in this simulation: the
receiver posts it between two actions, the first such moment after the sender has computed it, at the latest before
the action that needs it.  A rank launches its messages by level, those of one level as one group, at a moment not
later than the level.

Progress, whatever the actions and messages take in fact, by induction over levels.  Let all groups below level T be
complete.  What precedes a group of level T on its rank are groups below T, and actions; these end by T in the
simulation, take time, and so began before T with what they had received, which is of levels below T.  (A group is
launched before the actions that need it, which start at its level or later and end after it.)  So each rank comes to
its group of level T.  The messages of this group are, on their other ranks, in groups of level T as well, so all of
these groups start, and then all of them are complete.  Hence there is no circle.  Two ranks launch their common
messages by level, and those of one level and direction in one order of all messages.

No delay: if actions take as long as in the simulation, and messages no time, then by the same induction each group of
level T ends at T, and no action starts later than with independent messages.  If they take longer or shorter, a rank
may wait for another one that it did not wait for before.  Simulated with messages of 0.05 and 0.2 of a forward, a
batch takes 0.95 to 1.00 of the time with independent messages that are received when they are needed, as messages are
under way during actions; with actions that vary by 10% (standard deviation) at most 1.03 of it.

Rejected: receives just before their action (with interleaved schedules up to 1.07 for messages of 0.2, and 1.05 for
actions that vary by 10%); a group for each pair of ranks, and single messages, in the same order (messages pass one
after the other through stages that hand on at once: up to 1.07 and 1.11); a communicator for each direction, as
above.  Early receives take the memory of the messages that are received and not needed next: at most one with 1F1B,
three with interleaved schedules.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from operator import attrgetter

import attrs

from zpartition.pipeline.schedule import Action, ActionKind, Schedule
from zpartition.pipeline.timeline import simulate

__all__ = ["Launch", "StageMessage", "launch_order", "sent_messages"]


@attrs.frozen(order=True)
class StageMessage:
    """An activation or a gradient from one rank to another."""

    stage: int  # that receives
    micro: int
    is_gradient: bool
    source: int  # rank that sends
    target: int  # rank that receives

    @property
    def edge(self) -> int:
        """Number of the connection, equal on both sides."""
        return 2 * self.stage + self.is_gradient


@attrs.frozen
class Launch:
    """Messages that a rank launches as one."""

    after: int  # number of this rank's actions that precede it
    messages: tuple[StageMessage, ...]  # sent and received; those of one direction in the order of both ranks


def sent_messages(schedule: Schedule, rank: int) -> Iterator[tuple[int, StageMessage]]:
    """Yield the messages that `rank` sends to other ranks, in its order, each with the index of the action."""
    for index, action in enumerate(schedule.ranks[rank]):
        if action.kind is ActionKind.FORWARD and action.stage + 1 < schedule.stages:
            stage = action.stage + 1
        elif action.kind.makes_gradient and action.stage:
            stage = action.stage - 1
        else:
            continue
        target = schedule.rank_of(stage)
        if target != rank:
            yield index, StageMessage(stage, action.micro, action.kind.makes_gradient, rank, target)


@functools.lru_cache(maxsize=16)
def launch_order(schedule: Schedule) -> tuple[tuple[Launch, ...], ...]:
    """Return the launches of each rank, in order, for a schedule that can be executed."""
    return tuple(_launches(exchanges) for exchanges in _exchanges(schedule))


@attrs.frozen
class _Exchange:
    """A message, as one of its ranks sees it."""

    level: float  # time of the exchange
    message: StageMessage
    after: int  # least number of actions of this rank that precede it


def _exchanges(schedule: Schedule) -> list[list[_Exchange]]:
    """Return the messages of each rank, by level."""
    ends: list[list[float]] = [[0.0] for _ in schedule.ranks]  # ends[rank][n]: end of its first n actions
    for bar in simulate(schedule).bars:
        ends[bar.rank].append(bar.stop)
    consumers = {action: index for actions in schedule.ranks for index, action in enumerate(actions)}
    found: list[list[_Exchange]] = [[] for _ in schedule.ranks]
    for rank in range(len(schedule.ranks)):
        for index, message in sent_messages(schedule, rank):
            sent = ends[rank][index + 1]
            latest = _consumer(message, consumers)
            after = min(bisect.bisect_left(ends[message.target], sent, hi=latest + 1), latest)
            level = max(sent, ends[message.target][after])
            found[rank].append(_Exchange(level, message, index + 1))
            found[message.target].append(_Exchange(level, message, after))
    return [sorted(each, key=attrgetter("level", "message")) for each in found]


def _consumer(message: StageMessage, index_of: dict[Action, int]) -> int:
    """Return the index of the action that needs the message, on its rank."""
    kinds = (ActionKind.BACKWARD, ActionKind.INPUT) if message.is_gradient else (ActionKind.FORWARD,)
    actions = (Action(message.stage, kind, message.micro) for kind in kinds)
    return next(index_of[action] for action in actions if action in index_of)


def _launches(exchanges: list[_Exchange]) -> tuple[Launch, ...]:
    """Join the messages of each level; none precedes a message of a lower level."""
    groups: dict[float, list[_Exchange]] = {}
    for each in exchanges:
        groups.setdefault(each.level, []).append(each)
    launches, after = list[Launch](), 0
    for group in groups.values():
        after = max(after, *(each.after for each in group))
        launches.append(Launch(after, tuple(each.message for each in group)))
    return tuple(launches)
