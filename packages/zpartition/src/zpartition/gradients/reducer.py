"""Gradient reducer, for all ZeRO stages.

Problem.  Gradients arrive in an order that autograd decides; some never arrive, some arrive twice in one backward
(re-entrant checkpointing of shared weights).  But all ranks must issue the same collectives in the same order, or
they deadlock or sum the wrong buckets.

Design.  A backward is a *round*.  In a sending round every bucket is sent exactly once, in one order that all ranks
share, whatever arrived: as soon as the bucket and all before it are complete; the rest at the end of the round, with
zeros for missing gradients.  So the sequence of collectives does not depend on what a rank computed.

Where a backward has other collectives, too (gathers of units, tokens of experts, heads, sums over tensor ranks), each
bucket also has a *position* among them, on which the ranks agree (launch_order.py): it leaves after the launches
before its position, and at the latest before the next one, complete or not.

The first sending round is in index order.  Afterwards the ranks exchange, once, the order in which buckets became
complete (all adopt rank 0's), their positions, and the buckets that got a gradient after they were sent, on any rank.
Such late gradients form a second message, since sums are linear; from then on these buckets are held until the end of
the round, behind the others.  Later a gradient can be late if it arrives twice for the first time, or, with
positions, if this backward differs from the first; with positions it stays here until the ranks agree on a second
message, at the end of the step (`finish`).  Without, they must agree, and a bucket of which some rank missed a
gradient in one step is sent last in the next (`expect_missing`); otherwise those behind it would wait, each in a
buffer.

In the first round of a backward that has other collectives no position is known.  Buckets then leave at its end;
those of units, which must not all be in memory at once, when other units are used (`pass_over`), since all ranks use
units in one order.

Outside a round the hooks do nothing, as when a GAN's generator trains through its discriminator: `.grad` behaves as
in plain torch.  At most `IN_FLIGHT_LIMIT` buckets are in flight, which bounds memory when gradients are sharded.  To
wait for one of them cannot end in a deadlock if every launch is heard, see [Note: no circle] in launch_order.py.
Sparse rows, whose exchange waits for their lengths, are sent last.

Rejected.  Counting expected contributions per parameter (wrong as soon as control flow depends on data); sending
buckets in order of completion (differs between ranks); autograd's private end-of-backward callback
(`queue_callback`): the caller, a context manager, knows when backward has returned.
"""

from __future__ import annotations

import collections
import enum
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

import attrs
import torch
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

import zcomm
from zpartition.gradients.bucket import BucketGradient, BucketPhase, NonFiniteProbe, Round
from zpartition.gradients.launch_order import END, START, LaunchClock, Position
from zpartition.gradients.placeholder import ADDED, HiddenGradientError
from zpartition.gradients.reduce import Factors, GradientReduction, factors, reduce_at, reduction_for
from zpartition.gradients.sparse import SparseRows
from zpartition.layout.layout import Layout
from zpartition.layout.policy import Averaging, ReduceAt, ZeroPolicy
from zpartition.layout.ranks import Ranks
from zpartition.memory.buffers import Arena, BufferPool

IN_FLIGHT_LIMIT = 2  # transient buffers in flight at once: one is sent while the next is filled


class Timing(enum.Enum):
    """When a complete bucket may leave."""

    UNKNOWN = "unknown"  # a first round without other launches, so far: at once
    HELD = "held"  # a first round with other launches: at its end, or when `pass_over` says so
    FREE = "free"  # ranks have agreed that there are no other launches: at once
    POSITIONS = "positions"  # ranks have agreed on positions among other launches

    @property
    def is_agreed(self) -> bool:
        return self in (Timing.FREE, Timing.POSITIONS)

    @property
    def is_bound(self) -> bool:
        """Return whether other launches wait for the buckets that are due before them."""
        return self in (Timing.HELD, Timing.POSITIONS)


class Reduction(enum.Enum):
    """What becomes of the gradients of a bucket."""

    OVER_RANKS = "over ranks"  # they are summed over ranks
    LOCAL = "local"  # every rank keeps its own, whole, and nothing is sent; costs whole gradients until the step


@attrs.frozen(eq=False)
class _Flight:
    """A bucket in flight; its tensors must live until `wait` has returned."""

    gradient: BucketGradient
    handle: zcomm.Handle
    sent: torch.Tensor  # (bucket.numel,) wire dtype
    received: torch.Tensor  # (bucket.numel,) or (span_numel,) wire dtype

    def finish(self, factor: float, dtype: torch.dtype) -> None:
        self.handle.wait()
        self.gradient.keep(self.received, factor, dtype)


@final
@attrs.define(eq=False)
class GradientReducer:
    """Turns autograd's gradients into the reduced accumulators that the optimizer reads.

    Invariant between rounds: `flights` is empty, and every bucket is IDLE, REDUCED or (accumulating locally) FILLING.
    """

    layout: Layout
    policy: ZeroPolicy
    ranks: Ranks
    reductions: Mapping[int, GradientReduction]  # by `Bucket.num_expert_shards`
    gradients: tuple[BucketGradient, ...]
    pool: BufferPool
    clock: LaunchClock
    on_complete: Callable[[int], None] = lambda index: None  # called with the index of a bucket that is complete
    hooks: list[RemovableHandle] = attrs.field(factory=list)
    flights: collections.deque[_Flight] = attrs.field(factory=collections.deque)
    kind: Round = Round.NONE
    num_arrived: int = 0  # gradients since the start of the running (or last) round
    plain: collections.Counter[tuple[int, int]] = attrs.field(
        factory=collections.Counter
    )  # by bucket and slot: gradients outside rounds
    order: tuple[int, ...] = ()  # bucket indices in the order of sending
    learnt: tuple[int, ...] = ()  # the same, while no rank misses a gradient
    positions: list[Position] = attrs.field(factory=list)  # by bucket; END: at the end of the round only
    timing: Timing = Timing.UNKNOWN
    may_be_late: bool = False  # ranks have not agreed yet which buckets of this step need a second message
    non_finite_probe: NonFiniteProbe = attrs.field(factory=NonFiniteProbe)
    num_unsent: int = 0  # rounds since the last sending one
    num_scaled: int = 0  # rounds of the running step whose gradients include a factor
    most_bytes: int = 0  # expected maximum of buffers at the end of a backward
    factors: tuple[Factors, ...] = ()  # by bucket
    reduction: Reduction = Reduction.OVER_RANKS
    shared_numel: Mapping[torch.dtype, int] = attrs.field(factory=dict)  # of buffers that serve buckets in turn
    _order_basis: tuple[object, ...] = ()  # what `order` follows from, at the last `expect_missing`
    _next: int = 0  # place in `order` of the next bucket to send
    _completed: dict[int, Position] = attrs.field(factory=dict)  # buckets in order of completion

    @classmethod
    def create(
        cls,
        layout: Layout,
        policy: ZeroPolicy,
        params: dict[str, Parameter],
        ranks: Ranks,
        device: torch.device,
        clock: LaunchClock,
    ) -> GradientReducer:
        """Hook every parameter of `layout`; `close` removes the hooks."""
        pool = BufferPool(device, Arena.create(buffer_bytes(layout, policy), device, ranks.shard))
        accumulating = reduce_at(policy, layout) is ReduceAt.BOUNDARY
        gradients = tuple(
            BucketGradient(
                bucket=bucket,
                params=tuple(params[slot.name] for slot in bucket.slots),
                local_dtype=policy.accumulate_for(bucket.dtype) if accumulating else bucket.dtype,
                pool=pool,
                factor=factors(policy, layout, bucket).on_arrival,
                rows=SparseRows(bucket.slots[0].shape[-1]) if bucket.is_sparse else None,
            )
            for bucket in layout.buckets
        )
        kinds = {bucket.num_expert_shards: bucket for bucket in layout.buckets}
        reductions = {
            d: reduction_for(ranks.groups_for(kinds[d]), kinds[d].num_shards, policy.of(kinds[d]))
            for d in sorted(kinds)
        }
        reducer = cls(layout, policy, ranks, reductions, gradients, pool, clock)
        clock.before = reducer._before_launch
        reducer._reset_positions(START)
        has_units = any(bucket.unit for bucket in layout.buckets)
        reducer.order = reducer._sorted(range(len(gradients)), lambda g: has_units and g.bucket.unit is None)
        reducer.most_bytes = buffer_bytes(layout, policy, num_backwards=2)
        reducer.shared_numel = shared_numels(layout)
        reducer.factors = tuple(factors(policy, layout, bucket) for bucket in layout.buckets)
        for gradient in gradients:
            for index, param in enumerate(gradient.params):
                hook = _hook(weakref.ref(reducer), weakref.ref(gradient), index)
                handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                reducer.hooks.append(handle)
        return reducer

    @contextmanager
    def round(self, *, is_last: bool, is_local: bool = False, is_scaled: bool = False) -> Iterator[None]:
        """Run one backward inside; at the end all its messages have been received.

        is_last: a step follows.
        is_local: nothing is sent.
        is_scaled: the gradients include a factor, so `.grad` does not show them.

        An exception inside drops the gradients of the whole step, because earlier gradients cannot be separated from
        those that the failed backward added.
        """
        self.num_scaled += is_scaled
        sending = not is_local and (is_last or reduce_at(self.policy, self.layout) is ReduceAt.MICRO_STEP)
        self._open(Round.SENDING if sending else Round.LOCAL)
        try:
            yield
            self._close_round()
        except BaseException:
            self.reset()
            raise

    def finish(self, *, any_late: bool | None = None) -> list[torch.Tensor]:
        """Return the accumulators, one per bucket: mean gradients of this rank's span (or of the whole bucket).

        Gradients that plain `loss.backward()` calls left in `.grad`, outside any round, are adopted and sent first.

        any_late: send late gradients, which some rank has (True); leave them out (False); ask the ranks (None).
        """
        if any(gradient.phase is BucketPhase.FILLING or gradient.kept is None for gradient in self.gradients):
            self.adopt_plain(1, is_last=True)
        if self.may_be_late and any_late is not False:
            self._send_late(self._agree_on_late())
        kept = [gradient.kept for gradient in self.gradients]
        assert all(tensor is not None for tensor in kept)
        return [tensor for tensor in kept if tensor is not None]

    def expect_missing(self, names: Collection[str]) -> None:
        """Send buckets with these parameters last from now on: some rank had no gradient for them.

        names: the same on all ranks.
        """
        basis = (names, self.learnt, tuple(self.positions))
        if self.timing is Timing.FREE and basis != self._order_basis:
            self._order_basis = basis
            missing = {b.index for b, s in self.layout.slots() if s.name in names} if names else frozenset[int]()
            self.order = self._sorted(self.learnt, lambda gradient: gradient.bucket.index in missing)

    def pass_over(self, indices: Collection[int]) -> None:
        """Send these buckets soon if no positions are known yet: all ranks have come beyond their weights."""
        if self.timing is Timing.HELD:
            for index in indices:
                self.positions[index] = START

    def late(self) -> set[int]:
        """Return the buckets of which this rank has gradients that arrived after they were sent."""
        return {gradient.bucket.index for gradient in self.gradients if gradient.late or gradient.late_grads}

    def average(self, averaging: Averaging) -> None:
        """Turn sums over ranks into means by `averaging`; there are no gradients of a step yet."""
        self.policy = attrs.evolve(self.policy, averaging=averaging)
        self.factors = tuple(factors(self.policy, self.layout, bucket) for bucket in self.layout.buckets)
        self.reduce_gradients(self.reduces)

    @property
    def reduces(self) -> bool:
        """Return whether gradients are summed over ranks."""
        return self.reduction is Reduction.OVER_RANKS

    def reduce_gradients(self, reduces: bool) -> None:
        """Reduce gradients from now on, or keep them local; there are no gradients of a step yet."""
        self.reduction = Reduction.OVER_RANKS if reduces else Reduction.LOCAL
        for gradient, factor in zip(self.gradients, self.factors):
            gradient.factor = factor.on_arrival if reduces else 1.0

    def reset(self) -> None:
        """Receive messages in flight, then drop all gradients, so that the next of each parameter is a first one.

        If the world has failed, it does not wait: nothing arrives any more.
        """
        while self.flights:
            handle = self.flights.popleft().handle
            if not zcomm.failure():
                handle.wait()
        self.kind, self.num_scaled, self.num_unsent, self.may_be_late = Round.NONE, 0, 0, False
        self.clock.stop()
        self.plain.clear()
        self.non_finite_probe.step_over()
        for gradient in self.gradients:
            gradient.reset()

    def adopt_plain(self, divisor: int, *, is_last: bool) -> None:
        """Send the gradients of plain `loss.backward()` calls, divided by `divisor`; a collective.

        is_last: a step follows.  Otherwise `.grad` is None afterwards, so that the next plain backward starts anew.
        """
        found = [(g, i) for g in self.gradients for i in range(len(g.params)) if g.has_plain(i)]
        grads = [gradient.take_plain(index) for gradient, index in found]  # opening a round may drop `.grad`
        with self.round(is_last=True):
            self.clock.stop()  # nothing else is launched, so this shows no order
            for (gradient, index), grad in zip(found, grads):
                gradient.params[index].grad = grad if divisor == 1 else grad / divisor
                self._provide(gradient)
                gradient.arrive(index)
        self.plain.clear()
        for gradient in () if is_last else self.gradients:
            gradient.detach_grads()

    def close(self) -> None:
        """Remove the hooks and drop the buffers."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.clock.remove()
        self.reset()
        self.pool.clear()

    # -- a round ---------------------------------------------------------------------------------

    def _open(self, kind: Round) -> None:
        self.kind, self._next, self.num_arrived = kind, 0, 0
        self._completed.clear()
        for gradient in self.gradients:
            gradient.open_round()
        if kind is not Round.SENDING:
            return
        self.clock.start()
        if not self.timing.is_agreed:
            self.timing = Timing.HELD if self.clock.expects_launches else Timing.UNKNOWN
            self._reset_positions(END if self.timing.is_bound else START)

    def _reset_positions(self, position: Position) -> None:
        self.positions = [END if gradient.rows is not None else position for gradient in self.gradients]

    def _arrived(self, gradient: BucketGradient, index: int) -> None:
        """Handle a gradient that autograd has written into `params[index].grad`."""
        if self.kind is Round.NONE:
            if gradient.shows_kept(index):
                raise HiddenGradientError(ADDED)
            self.plain[gradient.bucket.index, index] += 1
            if self.layout.world_size > 1:
                gradient.record_plain(index)
            return
        self.num_arrived += 1
        self.clock.begin()
        if gradient.phase in (BucketPhase.IN_FLIGHT, BucketPhase.REDUCED):
            gradient.late.add(index)
            if not self.timing.is_bound:
                self.positions[gradient.bucket.index] = END
            return
        self._provide(gradient)
        if gradient.arrive(index):
            self._completed.pop(gradient.bucket.index, None)  # the last time counts
            self._completed[gradient.bucket.index] = self.clock.now
            self.on_complete(gradient.bucket.index)
            if self.policy.overlap and self.kind is Round.SENDING:
                self._send_due(self.clock.now)

    def _before_launch(self, time: Position) -> None:
        """Send what is due before another collective is launched, which makes it `time`."""
        if self.timing is Timing.UNKNOWN:
            self.timing = Timing.HELD
            self._reset_positions(END)
        if self.timing.is_bound and self.policy.overlap:
            with torch.no_grad():
                self._send_due(time)

    def _send_due(self, time: Position) -> None:
        """Send the next buckets: those whose position is before `time`, and complete ones whose position it is."""
        with self.clock.paused():
            while self._next < len(self.order):
                gradient = self.gradients[self.order[self._next]]
                position = self.positions[gradient.bucket.index]
                is_forced = self.timing.is_bound and position < time
                if not is_forced and (position > self.clock.now or gradient.awaiting):
                    return
                self._send(gradient)
                self._next += 1

    def _close_round(self) -> None:
        self.num_unsent = 0 if self.kind is Round.SENDING else self.num_unsent + 1
        if self.kind is Round.SENDING:
            shows_order = self.clock.is_running
            self.clock.stop()
            for index in self.order[self._next :]:
                self._send(self.gradients[index])
            self._next = len(self.order)
            self._finish_flights(0)
            if not self.timing.is_agreed and shows_order:
                self._send_late(self._learn())
            elif self.timing.is_bound:
                self.may_be_late |= shows_order and any(position != END for position in self.positions)
            else:
                self._send_late(self.late())
            if self.pool.total_bytes > self.most_bytes:
                self._clear_pool()  # more buckets than expected were filled at once
        for gradient in self.gradients:
            gradient.close_round(is_scaled=self.num_scaled > 0)
        self.kind = Round.NONE

    def _clear_pool(self) -> None:
        for gradient in self.gradients:
            gradient.forget_views()
        self.pool.clear()

    def _learn(self) -> set[int]:
        """Agree on order and positions from now on; returns the buckets that some rank must send again.  Collective.

        A rank that misses a gradient of a bucket does not know its position; if all do, it is at the end.
        """
        incomplete = [index for index in self.order if index not in self._completed]  # sent at the end of the round
        mine = {
            "order": [*self._completed, *incomplete],
            "positions": list(self._completed.items()),
            "late": sorted(self.late()),
            "is_timed": self.clock.now != START,
        }
        answers = zcomm.all_gather_object(mine, self.ranks.world)
        is_timed = any(answer["is_timed"] for answer in answers)
        self.timing = Timing.POSITIONS if is_timed else Timing.FREE
        self._reset_positions(END if is_timed else START)
        found = [(index, tuple(position)) for answer in answers for index, position in answer["positions"]]
        for index, position in sorted(found) if is_timed else ():
            self.positions[index] = position  # the latest is the last
        late = {index for answer in answers for index in answer["late"]}
        self._send_at_end(late, answers[0]["order"])
        return late

    def _agree_on_late(self) -> set[int]:
        """Return the buckets that some rank must send again; later they are sent at the end.  Collective."""
        self.may_be_late = False
        late = self.late()
        flags = torch.tensor([index in late for index in range(len(self.gradients))], dtype=torch.int32)
        flags = flags.to(self.pool.device)
        zcomm.all_reduce(flags, self.ranks.world, op="max", label="late gradients")
        late = {index for index, is_late in enumerate(flags.tolist()) if is_late}
        self._send_at_end(late, self.learnt)
        return late

    def _send_at_end(self, indices: Collection[int], order: Iterable[int]) -> None:
        """Adopt `order`, with the buckets `indices` moved to the end of a round."""
        for index, gradient in enumerate(self.gradients):
            if index in indices or gradient.rows is not None:
                self.positions[index] = END
        self.order = self.learnt = self._sorted(order, lambda _: False)
        self._order_basis = ()

    def _sorted(self, order: Iterable[int], is_last: Callable[[BucketGradient], bool]) -> tuple[int, ...]:
        """Return `order` by position; of equal ones those that are `is_last` behind, and sparse rows at the end."""

        def key(index: int) -> tuple[bool, Position, bool]:
            gradient = self.gradients[index]
            return gradient.rows is not None, self.positions[index], is_last(gradient)

        return tuple(sorted(order, key=key))

    def _send_late(self, indices: set[int]) -> None:
        for index in sorted(indices):
            gradient = self.gradients[index]
            gradient.phase = BucketPhase.IDLE
            self._provide(gradient)
            gradient.arrive_late()
            self._send(gradient)
            self._finish_flights(0)
            if self.kind is Round.NONE:
                gradient.close_round(is_scaled=self.num_scaled > 0)

    # -- a message -------------------------------------------------------------------------------

    def _provide(self, gradient: BucketGradient) -> None:
        """Give an IDLE bucket a local buffer; waits for one in flight if there are enough."""
        if gradient.phase is not BucketPhase.IDLE or gradient.rows is not None:
            return
        numel, dtype, capacity = gradient.bucket.numel, gradient.local_dtype, self._capacity(gradient)
        buffer = self.pool.reuse(numel, dtype, capacity)
        while buffer is None and len(self.flights) >= IN_FLIGHT_LIMIT:
            self._finish_flights(len(self.flights) - 1)
            buffer = self.pool.reuse(numel, dtype, capacity)
        if buffer is None:
            buffer = self.pool.make(capacity, dtype)
        gradient.adopt(buffer)

    def _capacity(self, gradient: BucketGradient) -> int:
        """Return the elements of a buffer for this bucket: of one that serves others too, or its own.

        If whole gradients are kept, the buffers of a second backward serve others.
        """
        is_reused = self.layout.num_shards > 1 or self.policy.offload.moves_states
        is_reused &= reduce_at(self.policy, self.layout) is ReduceAt.MICRO_STEP
        is_reused |= gradient.borrowed is not None
        return max(gradient.bucket.numel, self.shared_numel[gradient.bucket.dtype] if is_reused else 0)

    def _send(self, gradient: BucketGradient) -> None:
        if gradient.rows is not None:
            self._send_rows(gradient, gradient.rows)
            return
        self._provide(gradient)
        wire = self.policy.wire_for(gradient.bucket)
        before = self.factors[gradient.bucket.index].before
        local = gradient.seal()
        self.non_finite_probe.inspect(gradient)
        if not self.reduces:
            span, dtype = gradient.bucket.span(self.ranks.rank), self.policy.accumulate_for(gradient.bucket.dtype)
            gradient.keep_unreduced(local, span, dtype)
            return
        sent = local if self.layout.world_size == 1 else local.to(wire)
        if before != 1.0:
            sent.mul_(before)
        label = f"gradients[{gradient.bucket.index}]"
        exchange = self.reductions[gradient.bucket.num_expert_shards]
        handle, received = exchange.reduce(sent, gradient.bucket.span(self.ranks.rank), label)
        for flight in self.flights:
            flight.handle.proceed()  # a second phase is launched behind the next bucket, on all ranks
        self.flights.append(_Flight(gradient, handle, sent, received))
        if gradient.mover is not None:
            self._finish_flights(0 if self.layout.world_size == 1 else 1)  # moves gradients to the host

    def _send_rows(self, gradient: BucketGradient, rows: SparseRows) -> None:
        """Exchange the rows of a sparse gradient; waits, because the lengths must be known."""
        self._finish_flights(0)  # another rank may first wait for the second phase of a message (hybrid sums)
        bucket = gradient.bucket
        before, after = self.policy.averaging.factors(self.layout.world_size)
        indices, values = rows.packed(self.policy.wire_for(bucket), self.pool.device)
        parts = zcomm.gather_rows(indices, values, self.ranks.groups_for(bucket).world, label=f"rows[{bucket.index}]")
        gradient.keep_rows(parts, self.ranks.rank, factor=before * after)

    def _finish_flights(self, leave: int) -> None:
        """Wait for the oldest messages until `leave` are in flight."""
        while len(self.flights) > leave:
            flight = self.flights.popleft()
            bucket = flight.gradient.bucket
            flight.finish(self.factors[bucket.index].after, self.policy.accumulate_for(bucket.dtype))


def _hook(
    reducer: weakref.ref[GradientReducer], gradient: weakref.ref[BucketGradient], index: int
) -> Callable[[torch.Tensor], None]:
    """Return a hook with weak references: the garbage collector does not see through autograd's hooks."""

    def arrived(_param: torch.Tensor) -> None:
        owner, own = reducer(), gradient()
        if owner is not None and own is not None:
            owner._arrived(own, index)

    return arrived


def buffer_bytes(layout: Layout, policy: ZeroPolicy, num_backwards: int = 1) -> int:
    """Return the maximum bytes of gradient buffers.

    One buffer for each bucket if whole gradients are kept or accumulate over micro-steps, else a few for all; if
    whole gradients are kept and reduced after each backward, both from the second backward of a step on.  The first
    backward of a split model at stage 2 needs one for each bucket, once.
    """
    if not layout.buckets:
        return 0
    fills = reduce_at(policy, layout) is ReduceAt.BOUNDARY
    dense = [bucket for bucket in layout.buckets if not bucket.is_sparse]
    sizes = [b.numel * (policy.accumulate_for(b.dtype) if fills else b.dtype).itemsize for b in dense]
    few = sum(
        _few_numel(size, numels) * (policy.accumulate_for(dtype) if fills else dtype).itemsize
        for dtype, size in shared_numels(layout).items()
        if (numels := [bucket.numel for bucket in dense if bucket.dtype == dtype])
    )
    if layout.num_shards == 1 and not policy.offload.moves_all_states:
        return sum(sizes) + (few if num_backwards > 1 and not fills else 0)
    return sum(sizes) if fills else few


def shared_numels(layout: Layout) -> dict[torch.dtype, int]:
    """Return the elements of the few buffers that serve buckets in turn, by dtype.  Larger buckets have their own.

    The size is the one that costs least: an embedding that is several times the other buckets would set it for all.
    """
    dense = [bucket for bucket in layout.buckets if not bucket.is_sparse]
    numels = {dtype: [b.numel for b in dense if b.dtype == dtype] for dtype in {b.dtype for b in layout.buckets}}
    return {
        dtype: min((0, *sorted(sizes)), key=lambda size: _few_numel(size, sizes)) for dtype, sizes in numels.items()
    }


def _few_numel(shared: int, numels: Sequence[int]) -> int:
    """Return the elements of all buffers, if a few of size `shared` serve all buckets that fit."""
    return (IN_FLIGHT_LIMIT + 1) * shared + sum(numel for numel in numels if numel > shared)
