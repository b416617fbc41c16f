"""Launch clock: a time for gradient buckets that all ranks agree on, counted in launches of other collectives.

Problem.  NCCL demands that ranks launch the collectives of all groups that they share in one order.  The order of
gathers, tokens, heads, tensor-parallel sums and messages between stages follows from the program.  The order of the
buckets does, too (reducer.py), but *when* a bucket is complete depends on the gradients that a rank gets, so between
the two there is no order.

Design.  A clock counts what this rank launches in the running backward.  In a first backward the ranks agree, for
each bucket, on the latest time at which it became complete on any of them: its *position*.  Later a rank launches a
bucket at its position: after the launches counted there, and before the next one, complete or not.  Between two
launches buckets leave as they become complete, in an order that all ranks share, and nothing else is under way.  What
arrives after its bucket has left is sent once more, at the end of the step, if any rank says so.

The clock has four digits.  A launch advances the digit of its group's `Level` and clears those behind it.  Ranks of
one group must agree on the digits up to its level only: replicas may differ in their launches inside (one skips a
layer on all its tensor ranks) as long as they agree on what they do together.

[Note: no circle]  Give every launch a time: to a launch of the clock the time that it makes, to a bucket its position
and a half, then the place in the buckets' order, and to the second phase of a message (hybrid sharding) the time of
the bucket after it, just behind.  All members of a group launch the same operation at the same time, and each rank
launches in ascending time: a bucket leaves after the launches up to its position, and before the next.  So the
earliest operation that any rank waits for is next on all its members: no circle, and no rank that blocks on one of
its messages waits for something that it has yet to launch itself.  Pipeline stages count the same messages at
different numbers; there the times of a stage are mapped to those of the schedule, which is the same in each replica,
and positions are compared within one stage only.

Where it fails, it fails safely.  A backward with other launches than the first one sends buckets too early (with a
late message) or too late (at the end), in one order in any case.

Rejected.  Sending in the order of arrival (it depends on data); all gradients after the backward (nothing overlaps);
one communicator for everything (a mismatch becomes a wrong sum); agreeing by messages in each backward (a wait for the
device each time).
"""

from __future__ import annotations

import enum
import itertools
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


START: Position = (0,) * len(Level)
END: Position = (sys.maxsize,)  # after all launches of a backward

_EXCHANGES = ("all_to_all", "send", "receive")  # operations that only models use


@final
@attrs.define(eq=False)
class LaunchClock:
    """Counts the launches of this rank in a backward, except those of gradients."""

    ranks: frozenset[int]  # that sum gradients
    levels: Mapping[frozenset[int], Level]  # by the ranks of a group; others: see `_level`
    expects_launches: bool  # a backward will have some
    now: Position = START
    before: Callable[[Position], None] = lambda _: None  # called before a launch, with the time that it makes
    remove: Callable[[], None] = lambda: None  # ends the listening
    has_begun: bool = False  # autograd runs, or has run, in this backward; what comes before are preparations
    _thread: int = 0  # that runs the backward; 0: none runs, or the launches are not counted
    _known: weakref.WeakKeyDictionary[ProcessGroup, Level] = attrs.field(factory=weakref.WeakKeyDictionary)

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
        """Begin to count, from START, the launches of autograd, and of this thread after the first sign of autograd."""
        self.now, self.has_begun, self._thread = START, False, threading.get_ident()

    @property
    def is_running(self) -> bool:
        """Return whether launches are counted."""
        return self._thread != 0

    def stop(self) -> None:
        """Stop to count; `now` stays."""
        self._thread = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the launches of the block."""
        thread, self._thread = self._thread, 0
        try:
            yield
        finally:
            self._thread = thread

    def hear(self, op: str, group: ProcessGroup | None) -> None:
        """Count a launch of zcomm."""
        if self._thread:
            self.tick(self._level(group))
        elif not self.expects_launches and self._is_of_model(op, group):
            self.expects_launches = True

    def tick(self, level: Level) -> None:
        """Count a launch that follows."""
        if not self._thread or len(self.ranks) == 1:
            return
        is_in_backward = _compat.is_in_backward()
        self.has_begun |= is_in_backward
        if not self.has_begun or not (is_in_backward or self._thread == threading.get_ident()):
            return
        after = (*self.now[:level], self.now[level] + 1, *START[level + 1 :])
        self.before(after)
        self.now = after

    def _is_of_model(self, op: str, group: ProcessGroup | None) -> bool:
        """Return whether a launch between backwards shows that backwards have some, too."""
        return op.startswith(_EXCHANGES) or _ranks_of(group) not in self.levels

    def _level(self, group: ProcessGroup | None) -> Level:
        """Return the level of a group: known, or that of REPLICAS if it contains all that sum gradients."""
        group = dist.group.WORLD if group is None else group
        assert group is not None
        level = self._known.get(group)
        if level is None:
            members = _ranks_of(group)
            level = self.levels.get(members, Level.REPLICAS if members >= self.ranks else Level.OTHERS)
            self._known[group] = level
        return level


def _ranks_of(group: ProcessGroup | None) -> frozenset[int]:
    return frozenset(dist.get_process_group_ranks(group) if dist.is_initialized() else (0,))
