"""Unsharder: gathers and releases the units of stage 3.

Problem.  A unit must be unsharded when its module runs, when autograd needs its weights again, and when user code
reads them; and released as soon as possible, because stage 3 exists to save the memory of gathered units.  All ranks
must gather in the same order.

Design.  `unshard(unit)` is the only entry point; it also prefetches.  It is called when one of the unit's modules is
entered, when autograd unpacks a saved weight, and when a running module reads a parameter of another unit.
Correctness does not depend on the caller, so no graph analysis is needed.  A unit is resharded
- when its module returns, unless it is the next one to be gathered, or the policy lets units stay (residence.py) and
  it is used again before `policy.max_reuse_numel` elements of others: then backward finds it;
- in backward: after its last use, see [Note: room]; when backward ends;
- when the optimizer has updated the weights, because then it is outdated.

The sequence of uses is recorded.  From the second step on, each use prefetches what was used next in the last step,
at least a unit and up to `policy.prefetch_numel` elements ahead, but not beyond the end of a backward, where
everything is released.  A step with another sequence is followed and recorded anew: a wrong guess costs a gather,
never a wrong result.

[Note: room] All ranks must agree on which units are unsharded, so this depends on the order of uses alone.  It does
not depend on gradients: a rank may have none for an unused weight.  In backward a unit is released when another is
used, if it was not used again in the last step; in a first step, and where steps differ, the least recently used ones
are released when those used since exceed the planned memory.  Weights that the running autograd node has unpacked
stay, because the node is about to read them; so does a unit that encloses the one being used.  Reads outside of the
model's calls (state dicts, `gathered`) are no uses and leave units as they found them: one rank alone may read what
is unsharded.

[Note: two orders] All ranks gather in one order, because they call the same modules, and send gradients in one order
(reducer.py).  Gradients use a second process group over the same ranks, so that neither waits for the other.  The
order between the two follows from the clock (launch_order.py), which counts uses, not gathers: prefetch moves those.

Rejected.  Gathering by backward hooks of modules (they need outputs that require a gradient, break in-place
operations, and miss weights that another module uses); one order fixed when the model is built.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

import attrs
import torch
from torch import nn

import zcomm
from zpartition import _compat
from zpartition.gradients.launch_order import LaunchClock, Level
from zpartition.layout.policy import OffloadStateType, Tier, ZeroPolicy
from zpartition.layout.ranks import Ranks
from zpartition.layout.residence import NO_RESIDENCE, Residence, residence, unit_numels
from zpartition.layout.units import encloses
from zpartition.memory.buffers import BufferPool
from zpartition.weights.gather_sources import most_gathered_bytes
from zpartition.weights.sharded import ShardedState, ShardedStorage

__all__ = ["UNKNOWN_READER", "Unit", "Unsharder"]

UNKNOWN_READER = -1  # the unit must stay until its gradients have arrived, whatever other ranks do
_READ_AHEAD = 3  # units whose shards are read from disk before they are gathered
_LONGEST_TRACE = 100_000  # uses; a loop that never steps must not grow for ever


class UnshardMode(enum.Enum):
    """Values that a gather brings, where the policy lets modules see inexact weights (gather_sources.py)."""

    COMPUTE = "modules"  # for modules: decoded values, or those of a secondary shard
    EXACT = "exact"  # for users, state dicts and edits: the spans of their owners


@final
@attrs.define(eq=False)
class Unit:
    """Buckets that are gathered together."""

    name: str  # path of its module
    storages: tuple[ShardedStorage, ...]
    numel: int = attrs.field(init=False)  # elements of all its buckets, padding included
    depth: int = 0  # running calls of its modules, and `gathered` blocks, that hold it
    is_used: bool = False  # unsharded on request (not only prefetched) since it was last resharded
    mode: UnshardMode = UnshardMode.COMPUTE  # of the current gather, or of the next one
    missing: set[int] = attrs.field(factory=set)  # trainable buckets whose gradients have not all arrived
    reader: int | None = None  # the last autograd node that unpacked one of its weights

    @numel.default
    def _count(self) -> int:
        return sum(storage.bucket.numel for storage in self.storages)

    @property
    def is_exact(self) -> bool:
        """Return whether both modes give the same values."""
        return all(storage.is_exact for storage in self.storages)

    @property
    def is_resident(self) -> bool:
        """Return whether the shards are in the memory of the device."""
        return all(storage.param_placement.tier is Tier.DEVICE for storage in self.storages)

    @property
    def is_sharded(self) -> bool:
        return self.storages[0].sharded_state is ShardedState.SHARDED


_PAUSE = Unit("", ())  # in a sequence of uses: end of a backward


@final
@attrs.define(eq=False)
class Unsharder:
    """The units of one partition.

    Invariant: a unit in use is UNSHARDED; between steps none is in use.
    """

    policy: ZeroPolicy
    ranks: Ranks
    units: dict[str, Unit]
    pool: BufferPool
    unit_of_bucket: dict[int, Unit] = attrs.field(factory=dict)  # of trained buckets, by index
    unit_at: dict[int, ShardedStorage] = attrs.field(
        factory=dict
    )  # address of a buffer -> the storage whose weights it holds
    version: int = 0  # counts updates of the weights
    offloaded: frozenset[OffloadStateType] | None = None  # states that offload_states has moved; None: none
    live_numel: int = 0  # elements of units that are not SHARDED
    peak_numel: int = 0  # maximum of `live_numel` so far
    limits: Residence = NO_RESIDENCE
    recent: dict[str, Unit] = attrs.field(factory=dict)  # used in this backward and not evicted, in order of last use
    recent_numel: int = 0  # elements of `recent`
    borrowed: set[str] = attrs.field(factory=set)  # units gathered by reads outside of the model's calls
    finished: set[str] = attrs.field(factory=set)  # units of `recent` that this backward does not use again
    order: list[Unit] = attrs.field(factory=list)  # uses in the last step
    order_numel: int = 0  # elements of `order`, counted for each use
    last_uses: frozenset[int] = (
        frozenset()
    )  # positions in `order` after which a unit is not used before the next pause
    trace: list[Unit] = attrs.field(factory=list)  # uses in this step
    clock: LaunchClock = attrs.field(factory=LaunchClock)  # of the gradients
    pass_over: Callable[[Collection[int]], None] = lambda _: None  # called with buckets that no node reads any more
    read: dict[str, Unit] = attrs.field(factory=dict)  # units that nodes of this backward have read, not passed over
    _next: int = 0  # expected position in `order` of the next use

    @classmethod
    def of(
        cls,
        module: nn.Module,
        storages: Sequence[ShardedStorage],
        policy: ZeroPolicy,
        ranks: Ranks,
        device: torch.device,
    ) -> Unsharder:
        """Return the units of `storages`, which hold parameters of `module`, by the names in their buckets."""
        members: dict[str, list[ShardedStorage]] = {}
        for storage in storages:
            assert storage.bucket.unit is not None
            members.setdefault(storage.bucket.unit, []).append(storage)
        units = {name: Unit(name, tuple(found)) for name, found in members.items()}
        buckets = [storage.bucket for storage in storages]
        numels = unit_numels(module, buckets)
        limits = residence(numels, policy, buckets[0].num_shards if buckets else 1)
        pool = BufferPool(device, limit_bytes=most_gathered_bytes(numels, buckets, policy))
        trained = {s.bucket.index: unit for unit in units.values() for s in unit.storages if s.is_trained}
        return cls(policy, ranks, units, pool, trained, limits=limits)

    # -- unshard and reshard ---------------------------------------------------------------------

    def unshard(self, unit: Unit, *, exact: bool = False) -> None:
        """Gather `unit`, and prefetch the units after it.

        exact: show and edit exact weights, outside of the model's calls; modules see them, too, until the unit is
        resharded.
        """
        if exact and unit.mode is not UnshardMode.EXACT and not unit.is_exact:
            self._release(unit)
            unit.mode = UnshardMode.EXACT
        is_new = not unit.is_used
        if _compat.is_in_backward():
            self._make_room(unit)
            is_new |= not (self.trace and self.trace[-1] is unit)
        if not is_new:
            return
        launches = nullcontext() if exact and not unit.is_sharded else self._launches(unit)
        with launches, torch.inference_mode(False), torch.no_grad():  # buffers outlive the mode they are made in
            if exact and unit.is_sharded:
                self.borrowed.add(unit.name)
            if not unit.is_used:
                self._unshard(unit)
            if not exact:
                self._follow(unit)

    def _launches(self, unit: Unit) -> AbstractContextManager[None]:
        """Count a use of `unit`, and return a context for its gathers, which belong to it."""
        node, passed = _compat.running_node(), list[int]()
        for other in list(self.read.values()) if node is not None else ():
            if not (encloses(other.name, unit.name) or other is unit or other.reader in (node, UNKNOWN_READER)):
                del self.read[other.name]
                passed += [storage.bucket.index for storage in other.storages if storage.is_trained]
        if passed:
            self.pass_over(passed)
        self.clock.tick(Level.REPLICAS)
        return self.clock.paused()

    def _unshard(self, unit: Unit) -> None:
        self._gather(unit)
        for storage in unit.storages:
            if storage.sharded_state is ShardedState.GATHERING:
                storage.arrive()
                assert storage.full is not None
                self.unit_at[storage.full.untyped_storage().data_ptr()] = storage
        unit.is_used = True
        unit.missing = {s.bucket.index for s in unit.storages if s.is_trained}

    def reshard(self, unit: Unit, *, exact: bool = False) -> None:
        """Release `unit`, unless a call holds it or it may stay; exact: after a read outside of calls."""
        if unit.depth or _compat.is_in_backward():
            return
        unit.is_used = False
        if unit.name in self.borrowed or unit.mode is UnshardMode.EXACT or not (exact or self._may_stay(unit)):
            self._release(unit)  # exact weights too: reading them must not change what later steps compute

    def arrived(self, bucket_index: int) -> None:
        """Notify that all gradients of a bucket have arrived: nothing reads its weights any more."""
        unit = self.unit_of_bucket.get(bucket_index)
        if unit is not None and bucket_index in unit.missing:
            unit.missing.discard(bucket_index)
            if not unit.missing:
                unit.reader = None

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run one backward; afterwards only units of running modules, or held units, are unsharded."""
        self.read.clear()
        try:
            yield
        finally:
            self.release_all()
            self._pause()

    @contextmanager
    def derivatives(self) -> Iterator[None]:
        """Differentiate a graph beside the passes of a step; its uses of units are not recorded."""
        before = self.trace, self.order, self._next, self.pass_over
        self.trace, self.order, self._next, self.pass_over = [], [], 0, lambda _: None
        try:
            yield
        finally:
            self.release_all()
            self.trace, self.order, self._next, self.pass_over = before

    @contextmanager
    def keep_unsharded(self, units: Sequence[Unit]) -> Iterator[None]:
        """Keep exact weights of `units` unsharded inside the block."""
        for unit in units:
            unit.depth += 1
        try:
            if not _compat.is_in_backward():
                self._start_exact(units)
            for unit in units:
                self.unshard(unit, exact=True)
            yield
        finally:
            for unit in units:
                if unit.depth:  # 0 if it was dropped
                    unit.depth -= 1
                    self.reshard(unit, exact=True)
            self.pool.trim()  # to what training needs: the whole model may have been held

    def _start_exact(self, units: Sequence[Unit]) -> None:
        """Start the gathers of all `units`, so that no rank waits for the others after each of them.

        Shards that are read from elsewhere are gathered one unit at a time: each needs memory until it has arrived.
        """
        started = [unit for unit in units if unit.is_sharded and unit.is_resident]
        for unit in started if len(started) > 1 else ():
            unit.mode = unit.mode if unit.is_exact else UnshardMode.EXACT
            self.borrowed.add(unit.name)
            with self._launches(unit), torch.inference_mode(False), torch.no_grad():
                self._gather(unit)

    def release_all(self) -> None:
        """Release every unit that no call holds."""
        for unit in self.units.values():
            if not unit.depth:
                self._release(unit)
        self.recent, self.recent_numel = {}, 0
        self.finished.clear()
        self.read.clear()

    def end_step(self) -> None:
        """End a step; the next one is expected to have the same sequence of uses."""
        if self.trace:
            if [id(unit) for unit in self.trace] != [id(unit) for unit in self.order]:
                self.order = list(self.trace)
                self.order_numel = sum(unit.numel for unit in self.order)
                self.last_uses = _last_uses(self.order)
            self.trace.clear()
        self._next = 0

    def regather(self, unit: Unit) -> None:
        """Drop the gathered weights of `unit`, and gather them again if a call holds it."""
        mode = unit.mode
        self._release(unit)
        if unit.depth:
            self.unshard(unit, exact=mode is UnshardMode.EXACT)

    def drop(self, unit: Unit) -> None:
        """Drop the gathered weights of `unit`, even if calls hold it."""
        unit.depth = 0
        self._release(unit)

    def check_unwritten(self) -> None:
        """Raise ValueError if user code has filled sharded parameters: the values would be lost silently."""
        for unit in self.units.values():
            written = [storage for storage in unit.storages if storage.was_written()]
            if written:
                raise ValueError(
                    f"parameters of unit {unit.name!r} were written while their weights are sharded, so the values "
                    "are lost. Edit inside zpartition.gathered(module, modifier_rank=0)."
                )

    def invalidate(self) -> None:
        """Release outdated units after an update of the weights; held units are gathered again."""
        self.version += 1
        self.release_all()
        for unit in self.units.values():
            if not unit.is_sharded:
                self.regather(unit)

    def broadcast_edits(self, unit: Unit, source: int, adopt: Callable[[ShardedStorage], None]) -> None:
        """Broadcast the unsharded weights of rank `source`; `adopt` copies them into each storage's shard."""
        for storage in unit.storages:
            assert storage.full is not None
            whole = storage.full[: storage.bucket.numel]
            holders = self.ranks.groups_for(storage.bucket).world
            zcomm.broadcast(
                whole,
                holders,
                source=source // storage.bucket.num_expert_shards,
                label=f"edits of unit {unit.name!r}",
            )
            adopt(storage)

    def check_resident(self) -> None:
        """Raise RuntimeError while any state is offloaded (`offload_states`)."""
        if self.offloaded is not None:
            raise RuntimeError("states of this partition are offloaded: call reload_states() on every rank first")

    def check_weights_resident(self) -> None:
        """Raise RuntimeError while the weights are offloaded (`offload_states`)."""
        if self.offloaded is not None and OffloadStateType.WEIGHTS in self.offloaded:
            raise RuntimeError(
                "the weights of this module are offloaded by offload_states(): call reload_states() on every rank "
                "first"
            )

    def reset(self) -> None:
        """Release everything after an exception: no module is running."""
        for unit in self.units.values():
            unit.depth = 0
        self.release_all()
        self.end_step()

    @property
    def kept_bytes(self) -> int:
        """Bytes of quantized and secondary shards."""
        return sum(storage.source.kept_bytes for unit in self.units.values() for storage in unit.storages)

    def close(self) -> None:
        """Drop units and buffers."""
        self.units, self.order = {}, []
        self.trace.clear()
        self.unit_at.clear()
        self.pool.clear()

    # -- helpers ---------------------------------------------------------------------------------

    def _gather(self, unit: Unit) -> None:
        if not unit.is_sharded:
            return
        for storage in unit.storages:
            storage.gather(
                self.pool, self.ranks.groups_for(storage.bucket).shard, exact=unit.mode is UnshardMode.EXACT
            )
        self.live_numel += unit.numel
        self.peak_numel = max(self.peak_numel, self.live_numel)

    def _make_room(self, unit: Unit) -> None:
        """Note a use in backward, and release what is finished or used least recently; see [Note: room]."""
        if self.recent.pop(unit.name, None) is None:
            self.recent_numel += unit.numel
        self.recent[unit.name] = unit
        limit = self.limits.backward_numel
        if self.recent_numel <= limit and self.finished <= {unit.name}:
            return
        node = _compat.running_node()
        for other in list(self.recent.values()) if node is not None else ():
            is_finished = other.name in self.finished and other is not unit
            if not is_finished and (self.recent_numel <= limit or encloses(other.name, unit.name)):
                continue
            if not other.depth and other.reader not in (node, UNKNOWN_READER):
                del self.recent[other.name]
                self.recent_numel -= other.numel
                self.finished.discard(other.name)
                self._release(other)

    def _release(self, unit: Unit) -> None:
        unit.is_used, unit.reader = False, None
        self.borrowed.discard(unit.name)
        unit.missing.clear()
        unit.mode = UnshardMode.COMPUTE
        if unit.is_sharded:
            return
        for storage in unit.storages:
            if storage.full is not None:
                self.unit_at.pop(storage.full.untyped_storage().data_ptr(), None)
            storage.release(self.pool)
        self.live_numel -= unit.numel

    def _follow(self, unit: Unit) -> None:
        """Record a use, find it in the order of the last step, and gather ahead."""
        if len(self.trace) < _LONGEST_TRACE:
            self.trace.append(unit)
        position = self._position(unit)
        if position < 0:
            return
        self._next = position + 1
        if position in self.last_uses and unit.name in self.recent:
            self.finished.add(unit.name)
        for upcoming in self.order[self._next : self._next + _READ_AHEAD]:
            for storage in upcoming.storages:
                storage.begin_reading()
        ahead, most = 0, self.policy.prefetch_numel
        for upcoming in self.order[self._next :] if most else ():
            if upcoming is _PAUSE or (ahead and ahead + upcoming.numel > most):
                break
            ahead += upcoming.numel
            if upcoming.is_sharded:
                if self.live_numel + upcoming.numel > self.limits.ahead_numel:
                    break
                self._gather(upcoming)

    def _pause(self) -> None:
        """End a backward: everything was released, and no prefetch crosses this position."""
        if self.trace and self.trace[-1] is not _PAUSE and len(self.trace) < _LONGEST_TRACE:
            self.trace.append(_PAUSE)
        pauses = (i for i in range(self._next, len(self.order)) if self.order[i] is _PAUSE)
        self._next = next(pauses, self._next - 1) + 1

    def _may_stay(self, unit: Unit) -> bool:
        """Return whether `unit` may stay after its call."""
        if self.live_numel <= self.limits.next_numel and self._is_next(unit):
            return True
        return self.live_numel <= self.limits.stay_numel and self._distance(unit) <= self.policy.max_reuse_numel

    def _is_next(self, unit: Unit) -> bool:
        """Return whether, once sharded, `unit` would be the next one to be gathered, by the last step's order."""
        upcoming = (each for each in self.order[self._next :] if each is unit or each is _PAUSE or each.is_sharded)
        return next(upcoming, None) is unit

    def _distance(self, unit: Unit) -> int:
        """Return the elements used before `unit` is used again, by the last step's order; 0 if unknown."""
        if self.order_numel <= self.policy.max_reuse_numel:
            return 0
        total = 0
        for upcoming in self.order[self._next :]:
            if upcoming is unit:
                break
            total += upcoming.numel
        return total

    def _position(self, unit: Unit) -> int:
        """Return the position of this use in `order`: as expected, else the next one, else the first; -1 if new."""
        if self._next < len(self.order) and self.order[self._next] is unit:
            return self._next
        places = [index for index, other in enumerate(self.order) if other is unit]
        return next((index for index in places if index >= self._next), places[0] if places else -1)


def _last_uses(order: Sequence[Unit]) -> frozenset[int]:
    """Return the positions after which a unit is not used before the next pause."""
    found: set[int] = set()
    seen: set[int] = set()
    for position in reversed(range(len(order))):
        if order[position] is _PAUSE:
            seen.clear()
        elif id(order[position]) not in seen:
            seen.add(id(order[position]))
            found.add(position)
    return frozenset(found)
