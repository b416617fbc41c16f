"""Launch clock: a time for gradient buckets that all ranks agree on, counted in launches of other collectives.

Problem.  NCCL demands that ranks launch the collectives of all groups that they share in one order.  The order of
gathers, tokens, heads, tensor-parallel sums and messages between stages follows from the program.  The order of the
buckets does, too (reducer.py), but *when* a bucket is complete depends on the gradients that a rank gets, so between
the two there would be no order.

Design.  A clock counts what this rank launches in a backward.  After a first backward the ranks agree, for each
bucket, on the latest time at which it became complete on any of them: its *position*.  From then on a rank launches a
bucket at its position: after the launches counted there, and before the next one, complete or not.  Between two
launches buckets leave as they become complete, in an order that all ranks share, and nothing else is under way.  What
arrives after its bucket has left is sent once more, at the end of the step, if any rank has such gradients.

The clock has four digits.  A launch advances the digit of its group's `Level` and clears those behind it.  Ranks of
one group must agree on the digits up to its level only: replicas may differ in their launches inside (one skips a
layer on all its tensor ranks) as long as they agree on what they do together.

[Note: no circle]  Give every launch a time: to one that is counted, the time that it makes; to a bucket, its position
and a half, then its place in the order of buckets; to the second phase of a message (hybrid sharding), that of the
bucket after it, just behind.  All members of a group launch the same operation at the same time, and each rank
launches in ascending time.  So of all launches that have not ended, the earliest is the next one of all its members:
there is no circle, and a rank that waits for its own message waits for nothing that is yet to be launched by itself.
Stages of a pipeline count the same message at different times.  But every replica follows one schedule, buckets join
ranks of one stage only, and they keep their place among its messages; so the schedule, with the buckets in it, gives
the times.

Where a backward differs from the first one, buckets leave too early (their gradients are then late, and from the next
step on they leave at the end) or too late, but in one order in any case.  Two things the clock cannot know.  Launches
through torch's own functions count only if `zcomm.launching` announces them.  And a backward whose first round had no
other launches, in a model without splits and units, is taken to have none later: a loss that begins to communicate in
mid-training must do so from the first step on.

Rejected.  Sending in the order of arrival (it depends on data); all gradients after the backward (nothing overlaps);
one communicator for everything (a mismatch becomes a wrong sum); a message in each backward that says what is
complete (the host would wait for the device).
"""

from __future__ import annotations

import enum
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import final

import attrs
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

import zcomm
from zpartition import _compat
from zpartition.layout.model_parallel import expert_shards_of, model_parallel_group_of, pipeline_stages_of
from zpartition.layout.ranks import Ranks

__all__ = ["END", "START", "LaunchClock", "Level", "Position"]

Position = tuple[int, ...]  # digits by level


class Level(enum.IntEnum):
    """Digit of the clock that a launch advances; a group's ranks agree on the digits up to its own."""

    REPLICAS = 0  # what all replicas do alike: uses of units, messages between stages
    EXPERTS = 1  # tokens: between ranks of several replicas
    TENSOR = 2  # parts of tensors: inside a replica
    OTHERS = 3  # parts of sequences, and groups that only the model knows


class ClockState(enum.Enum):
    """What a clock does with a launch."""

    STOPPED = "stopped"  # no backward runs
    PAUSED = "paused"  # not counted
    READY = "ready"  # counted if autograd runs: before it does, a backward is only prepared
    RUNNING = "running"  # counted


START: Position = (0,) * len(Level)
END: Position = (sys.maxsize,)  # after all launches of a backward

_EXCHANGES = ("all_to_all", "send", "receive")  # operations that only models use


@final
@attrs.define(eq=False)
class LaunchClock:
    """Counts the launches of this rank in a backward, except those of gradients."""

    ranks: frozenset[int] = frozenset({0})  # that sum gradients; one alone: nothing is counted
    levels: Mapping[frozenset[int], Level] = attrs.field(factory=dict)  # by the ranks of a group
    expects_launches: bool = False  # a backward will have some
    now: Position = START
    before: Callable[[Position], None] = lambda _: None  # called before a launch, with the time that it makes
    remove: Callable[[], None] = lambda: None  # ends the listening
    state: ClockState = ClockState.STOPPED
    _thread: int = 0  # that runs the backward
    _known: weakref.WeakKeyDictionary[ProcessGroup, tuple[Level, bool]] = attrs.field(
        factory=weakref.WeakKeyDictionary
    )

    @classmethod
    def of(cls, module: nn.Module, ranks: Ranks, *, has_units: bool) -> LaunchClock:
        """Return a clock that hears all launches of this process.

        ranks: that sum the gradients of `module`.
        has_units: weights are gathered in backward.
        """
        tensor, stages = model_parallel_group_of(module), pipeline_stages_of(module)
        experts = list(expert_shards_of(module).values())
        levels = {_ranks_of(tensor.group): Level.TENSOR} if tensor.size > 1 else {}
        levels |= {_ranks_of(each.group): Level.EXPERTS for each in experts}
        levels |= {_ranks_of(stages.group): Level.REPLICAS} if stages.size > 1 else {}
        for own in (ranks, *ranks.holders.values()):
            levels |= dict.fromkeys(map(_ranks_of, (own.world, own.shard, own.replicas)), Level.REPLICAS)
        is_split = tensor.size > 1 or stages.size > 1 or bool(experts)
        clock = cls(_ranks_of(ranks.world), levels, ranks.size > 1 and (has_units or is_split))
        if ranks.size > 1:
            clock.remove = zcomm.on_launch(clock.hear)
        return clock

    def start(self) -> None:
        """Begin to count, from START: launches of autograd, and those of this thread once autograd has begun."""
        self.now, self.state, self._thread = START, ClockState.READY, threading.get_ident()

    def begin(self) -> None:
        """Note that autograd runs."""
        if self.state is ClockState.READY:
            self.state = ClockState.RUNNING

    @property
    def is_running(self) -> bool:
        """Return whether a backward runs."""
        return self.state is not ClockState.STOPPED

    def stop(self) -> None:
        """Stop to count; `now` stays."""
        self.state = ClockState.STOPPED

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the launches of the block."""
        before, self.state = self.state, ClockState.PAUSED
        try:
            yield
        finally:
            self.state = before

    def hear(self, op: str, group: ProcessGroup | None) -> None:
        """Count a launch of zcomm; between backwards, learn from it whether backwards have some."""
        level, is_listed = self._level(group)
        self.tick(level)
        if self.state is ClockState.STOPPED and (not is_listed or op.startswith(_EXCHANGES)):
            self.expects_launches = True

    def tick(self, level: Level) -> None:
        """Count a launch that follows."""
        if self.state in (ClockState.STOPPED, ClockState.PAUSED) or len(self.ranks) == 1:
            return
        if _compat.is_in_backward():
            self.begin()
        elif self.state is ClockState.READY or self._thread != threading.get_ident():
            return
        after = (*self.now[:level], self.now[level] + 1, *START[level + 1 :])
        self.before(after)
        self.now = after

    def _level(self, group: ProcessGroup | None) -> tuple[Level, bool]:
        """Return the level of a group, and whether its ranks are listed; those that contain all of ours are high."""
        group = dist.group.WORLD if group is None else group
        assert group is not None
        found = self._known.get(group)
        if found is None:
            ranks = _ranks_of(group)
            level = self.levels.get(ranks, Level.REPLICAS if ranks >= self.ranks else Level.OTHERS)
            found = self._known[group] = level, ranks in self.levels
        return found


def _ranks_of(group: ProcessGroup | None) -> frozenset[int]:
    return frozenset(dist.get_process_group_ranks(group) if dist.is_initialized() else (0,))
