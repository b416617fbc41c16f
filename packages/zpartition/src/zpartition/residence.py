"""Which units are gathered, and when: the life of stage 3's weights.

Problem.  A unit must be whole when its module runs, when autograd needs its weights again, and when somebody reaches
for them from outside; and gone as soon as possible, because gathered units are what stage 3 is to save.  All ranks
must gather in the same order.

Design.  `use(unit)` is the one way to make a unit whole, called when a module of its is entered, when autograd
unpacks a saved weight, and when a running module reads a parameter of another unit.  It never matters for
correctness who asked, so no graph has to be analysed.  A unit is left
- when its module returns, unless all that is whole fits into `policy.max_live_numel` and it is used again before
  `policy.max_reuse_numel` elements of others are: then backward finds it;
- in backward, when every gradient of the unit has arrived; when room is needed, see below; and at the end, whatever
  is left;
- when the optimizer has moved the weights, because then it is stale.

The sequence of uses is recorded.  From the second step on, each use starts to gather what was used next the last
time, up to `policy.prefetch_numel` elements ahead, but not beyond the end of a backward, where everything is
released.  A step that goes another way is followed as it goes, and recorded anew: a wrong guess costs a gather, never
a wrong result.

[Note: room] Some gradients never come: of frozen weights, of an expert that nobody chose.  A unit that waits for one
would stay to the end of the backward, and with it as many as there are.  So in backward the units that were used
longest ago are left when those used since exceed what the plan of memory says.  That looks at the order of uses alone
and never at what has arrived: ranks must agree on who is whole when a unit is used again.  What the running node of
autograd has unpacked stays, because that node is about to read it; so does a unit that encloses the one being used.

[Note: two orders] All ranks gather in one order, because they call the same modules, and send gradients in one order
(reducer.py); but which gradients a rank has, and when, depends on its data, so the two orders have no order between
them.  Gradients therefore travel in a group of their own.

Rejected.  Gathering by hooks on the backward of modules (they need outputs that require a gradient, break in-place
operations, and miss weights that another module uses); one order fixed when the model is built.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import attrs
import torch

from zpartition import _compat
from zpartition.buffers import BufferPool
from zpartition.policy import ZeroPolicy
from zpartition.ranks import Ranks
from zpartition.sharded import Presence, ShardedStorage
from zpartition.units import encloses, nested_numel

__all__ = ["UNKNOWN_READER", "Residence", "Unit"]

UNKNOWN_READER = -1  # of a unit that must stay until its gradients have arrived
_READ_AHEAD = 3  # units whose shards are read from disk before they are gathered
_LONGEST_TRACE = 100_000  # uses; a loop that never steps must not grow for ever


class Form(enum.Enum):
    """What a gather brings, where the policy lets modules see something else than the truth (sources.py)."""

    MODULES = "modules"  # what modules compute with: decoded, or of a secondary shard
    EXACT = "exact"  # the spans of their owners, for people


@final
@attrs.define(eq=False)
class Unit:
    """The buckets that are gathered together."""

    name: str  # path of its module
    storages: tuple[ShardedStorage, ...]
    numel: int = attrs.field(init=False)  # elements of all its buckets, padding included
    depth: int = 0  # calls of its modules that are running, and holds
    is_used: bool = False  # somebody has asked for it since it was last left
    form: Form = Form.MODULES  # of what is whole, or the next to be
    missing: set[int] = attrs.field(factory=set)  # trainable buckets whose gradients have not all arrived
    reader: int | None = None  # the autograd node that unpacked a weight of it last

    @numel.default
    def _count(self) -> int:
        return sum(storage.bucket.numel for storage in self.storages)

    @property
    def shows_truth(self) -> bool:
        """Whether both forms are one."""
        return all(storage.shows_truth for storage in self.storages)

    @property
    def is_resting(self) -> bool:
        return self.storages[0].presence is Presence.RESTING


_PAUSE = Unit("", ())  # in an order of uses: a backward has ended there


@final
@attrs.define(eq=False)
class Residence:
    """The units of one partition.

    Invariant: a unit that is used is PRESENT; between steps none is used.
    """

    policy: ZeroPolicy
    ranks: Ranks
    units: dict[str, Unit]
    pool: BufferPool
    unit_of_bucket: dict[int, Unit] = attrs.field(factory=dict)  # of trained buckets, by index
    unit_at: dict[int, ShardedStorage] = attrs.field(factory=dict)  # address of a buffer -> whose weights are in it
    version: int = 0  # counts updates of the weights
    live_numel: int = 0  # elements of units that are not resting
    peak_numel: int = 0  # the most that there were
    largest_numel: int = 0  # of a unit
    room_numel: int = 0  # for units in backward, see [Note: room]
    recent: dict[str, Unit] = attrs.field(factory=dict)  # used in this backward, the last use last; those left go
    recent_numel: int = 0  # elements of those
    order: list[Unit] = attrs.field(factory=list)  # uses of the last step
    order_numel: int = 0  # elements of those, each use counted
    trace: list[Unit] = attrs.field(factory=list)  # uses of this one
    _next: int = 0  # position in `order` that is expected next

    @classmethod
    def of(
        cls,
        storages: Sequence[ShardedStorage],
        policy: ZeroPolicy,
        ranks: Ranks,
        device: torch.device,
    ) -> Residence:
        """Units by the names that the buckets carry, in the order of the storages."""
        members: dict[str, list[ShardedStorage]] = {}
        for storage in storages:
            assert storage.bucket.unit is not None
            members.setdefault(storage.bucket.unit, []).append(storage)
        units = {name: Unit(name, tuple(found)) for name, found in members.items()}
        numels = {name: unit.numel for name, unit in units.items()}
        largest_numel = max(numels.values(), default=0)
        room_numel = max(policy.max_live_numel, nested_numel(numels) + largest_numel)
        trained = {s.bucket.index: unit for unit in units.values() for s in unit.storages if s.is_trained}
        pool = BufferPool(device)
        return cls(policy, ranks, units, pool, trained, largest_numel=largest_numel, room_numel=room_numel)

    # -- using and leaving -----------------------------------------------------------------------

    def use(self, unit: Unit, *, exact: bool = False) -> None:
        """Make `unit` whole, and start to gather what comes after it.

        exact: for people, who are to see the truth, and may edit it; it is what modules see as well until everybody
        has left.
        """
        if exact and unit.form is not Form.EXACT and not unit.shows_truth:
            self._release(unit)
            unit.form = Form.EXACT
        if _compat.is_in_backward():
            self._make_room(unit)
        if unit.is_used:
            return
        with torch.inference_mode(False), torch.no_grad():  # buffers outlive the mode in which they are made
            self._use(unit)

    def _use(self, unit: Unit) -> None:
        self._fetch(unit)
        for storage in unit.storages:
            if storage.presence is Presence.COMING:
                storage.arrive()
                assert storage.full is not None
                self.unit_at[storage.full.untyped_storage().data_ptr()] = storage
        unit.is_used = True
        unit.missing = {s.bucket.index for s in unit.storages if s.is_trained}
        if unit.form is Form.MODULES:
            self._follow(unit)

    def leave(self, unit: Unit) -> None:
        """Nobody needs `unit` for now: release it, unless it is running or everything whole may stay."""
        if unit.depth or _compat.is_in_backward():
            return
        unit.is_used = False
        is_too_much = self.live_numel > self.policy.max_live_numel
        if is_too_much or unit.form is Form.EXACT or self._distance(unit) > self.policy.max_reuse_numel:
            self._release(unit)  # the truth goes too: a run that looks at it must go on like one that does not

    def arrived(self, bucket_index: int) -> None:
        """All gradients of a bucket are there: when that holds for the whole unit, backward is through with it."""
        unit = self.unit_of_bucket.get(bucket_index)
        if unit is not None and bucket_index in unit.missing:
            unit.missing.discard(bucket_index)
            if not unit.missing and not unit.depth:
                self._release(unit)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around one backward; afterwards nothing is whole unless a module is running or holds it."""
        try:
            yield
        finally:
            self.release_all()
            self._pause()

    @contextmanager
    def held(self, units: Sequence[Unit]) -> Iterator[None]:
        """Whole, exact and kept inside the block, whatever is called there."""
        for unit in units:
            unit.depth += 1
        try:
            for unit in units:
                self.use(unit, exact=True)
            yield
        finally:
            for unit in units:
                if unit.depth:  # dropped otherwise
                    unit.depth -= 1
                    self.leave(unit)

    def release_all(self) -> None:
        """Release every unit that is not running."""
        for unit in self.units.values():
            if not unit.depth:
                self._release(unit)
        self.recent, self.recent_numel = {}, 0

    def end_step(self) -> None:
        """The step is over: the next one is expected to go the same way."""
        if self.trace:
            if [id(unit) for unit in self.trace] != [id(unit) for unit in self.order]:
                self.order = list(self.trace)
                self.order_numel = sum(unit.numel for unit in self.order)
            self.trace.clear()
        self._next = 0

    def forget(self, unit: Unit) -> None:
        """Throw away what is gathered of `unit`, running or not: whoever needs it gathers it again."""
        form = unit.form
        self._release(unit)
        if unit.depth:
            self.use(unit, exact=form is Form.EXACT)

    def drop(self, unit: Unit) -> None:
        """Throw away what is gathered of `unit`, and let nobody hold it."""
        unit.depth = 0
        self._release(unit)

    def refuse_written(self) -> None:
        """Raise ValueError if somebody has filled parameters that rest: it would be lost in silence."""
        for unit in self.units.values():
            written = [storage for storage in unit.storages if storage.was_written()]
            if written:
                raise ValueError(
                    f"parameters of unit {unit.name!r} were written while their weights rest in shards, where "
                    "nobody sees it. Edit inside zpartition.gathered(module, modifier_rank=0)."
                )

    def stale(self) -> None:
        """The weights have changed: what was gathered shows old ones; what somebody holds is gathered again."""
        self.version += 1
        self.release_all()
        for unit in self.units.values():
            if not unit.is_resting:
                self.forget(unit)

    def reset(self) -> None:
        """After an exception: nothing is running any more."""
        for unit in self.units.values():
            unit.depth = 0
        self.release_all()
        self.end_step()

    @property
    def kept_bytes(self) -> int:
        """What units are gathered from in place of their shards."""
        return sum(storage.source.kept_bytes for unit in self.units.values() for storage in unit.storages)

    def close(self) -> None:
        """Forget units and buffers."""
        self.units, self.order = {}, []
        self.trace.clear()
        self.unit_at.clear()
        self.pool.clear()

    # -- helpers ---------------------------------------------------------------------------------

    def _fetch(self, unit: Unit) -> None:
        if not unit.is_resting:
            return
        for storage in unit.storages:
            storage.gather(self.pool, self.ranks.having(storage.bucket).shard, exact=unit.form is Form.EXACT)
        self.live_numel += unit.numel
        self.peak_numel = max(self.peak_numel, self.live_numel)

    def _make_room(self, unit: Unit) -> None:
        """Note a use in backward, and leave what was used longest ago; see [Note: room]."""
        if self.recent.pop(unit.name, None) is None:
            self.recent_numel += unit.numel
        self.recent[unit.name] = unit
        node = None if self.recent_numel <= self.room_numel else _compat.running_node()
        for other in list(self.recent.values()) if node is not None else ():
            if self.recent_numel <= self.room_numel:
                return
            if not other.depth and other.reader not in (node, UNKNOWN_READER) and not encloses(other.name, unit.name):
                del self.recent[other.name]
                self.recent_numel -= other.numel
                self._release(other)

    def _release(self, unit: Unit) -> None:
        unit.is_used, unit.reader = False, None
        unit.missing.clear()
        unit.form = Form.MODULES
        if unit.is_resting:
            return
        for storage in unit.storages:
            if storage.full is not None:
                self.unit_at.pop(storage.full.untyped_storage().data_ptr(), None)
            storage.release(self.pool)
        self.live_numel -= unit.numel

    def _follow(self, unit: Unit) -> None:
        """Record the use, find it in the order of the last step, and gather ahead."""
        if len(self.trace) < _LONGEST_TRACE:
            self.trace.append(unit)
        position = self._position(unit)
        if position < 0:
            return
        self._next = position + 1
        for upcoming in self.order[self._next : self._next + _READ_AHEAD]:
            for storage in upcoming.storages:
                storage.begin_reading()
        ahead = 0
        for upcoming in self.order[self._next :]:
            ahead += upcoming.numel
            if upcoming is _PAUSE or ahead > self.policy.prefetch_numel:
                break
            if upcoming.is_resting:
                if not self._has_room(upcoming):
                    break  # what comes after it must not be gathered before it: other ranks may have room
                self._fetch(upcoming)

    def _pause(self) -> None:
        """A backward is over, and all was released: nothing is gathered ahead across this place."""
        if self.trace and self.trace[-1] is not _PAUSE and len(self.trace) < _LONGEST_TRACE:
            self.trace.append(_PAUSE)
        pauses = (i for i in range(self._next, len(self.order)) if self.order[i] is _PAUSE)
        self._next = next(pauses, self._next - 1) + 1

    def _has_room(self, unit: Unit) -> bool:
        """Whether gathering `unit` ahead keeps to `max_live_numel`, or to the two largest units."""
        return self.live_numel + unit.numel <= max(self.policy.max_live_numel, 2 * self.largest_numel)

    def _distance(self, unit: Unit) -> int:
        """Elements used, by the order of the last step, before `unit` is used again; 0 where that is not known."""
        if self.order_numel <= self.policy.max_reuse_numel:
            return 0
        total = 0
        for upcoming in self.order[self._next :]:
            if upcoming is unit:
                break
            total += upcoming.numel
        return total

    def _position(self, unit: Unit) -> int:
        """Where in the order this use is: as expected, else the next such use, else the first; -1 if it is new."""
        if self._next < len(self.order) and self.order[self._next] is unit:
            return self._next
        places = [index for index, other in enumerate(self.order) if other is unit]
        return next((index for index in places if index >= self._next), places[0] if places else -1)
