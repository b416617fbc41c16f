"""Gradient reducer, for all ZeRO stages.

Problem.  Gradients arrive in an order that autograd decides; some never arrive, some arrive twice in one backward
(re-entrant checkpointing of shared weights).  But all ranks must issue the same collectives in the same order, or
they deadlock or sum the wrong buckets.

Design.  A backward is a *round*.  In a sending round every bucket is sent exactly once, in one order that all ranks
share, whatever arrived: as soon as the bucket and all before it are complete; the rest at the end of the round, with
zeros for missing gradients.  So the sequence of collectives does not depend on what a rank computed.

The first sending round is in index order.  Afterwards the ranks exchange, once, the order in which buckets became
complete (all adopt rank 0's), and the buckets that got a gradient after they were sent, on any rank.  Such late
gradients form a second message, since sums are linear; from then on these buckets are held until the end of the
round, behind the others.  A gradient that arrives twice for the first time in a later round forms a second message,
too; there, ranks must agree.  A bucket of which some rank missed a gradient in one step is sent last in the next
(`expect_missing`); otherwise those behind it would wait, each in a buffer.

Outside a round the hooks do nothing, as when a GAN's generator trains through its discriminator: `.grad` behaves as
in plain torch.  At most `IN_FLIGHT_LIMIT` buckets are in flight, which bounds memory when gradients are sharded.

[Note: no deadlock]  A rank that misses a gradient sends its bucket at the end of the round, and before that it needs
the other ranks: at stage 3 to gather units, with experts to exchange tokens.  So no rank may block on that bucket in
the middle of a round: after `PATIENCE_S` a rank allocates more buffers for the rest of the round, and drops them at
its end.  Sparse rows, whose exchange waits for their lengths, are sent last.

Rejected.  Counting expected contributions per parameter (wrong as soon as control flow depends on data); sending
buckets in order of completion (differs between ranks); autograd's private end-of-backward callback
(`queue_callback`): the caller, a context manager, knows when backward has returned.
"""

from __future__ import annotations

import collections
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
from zpartition.gradients.placeholder import ADDED, HiddenGradientError
from zpartition.gradients.reduce import Factors, GradientReduction, factors, reduce_at, reduction_for
from zpartition.gradients.sparse import SparseRows
from zpartition.layout.layout import Layout
from zpartition.layout.policy import Averaging, ReduceAt, ZeroPolicy
from zpartition.layout.ranks import Ranks
from zpartition.memory.buffers import Arena, BufferPool

IN_FLIGHT_LIMIT = 2  # transient buffers in flight at once: one is sent while the next is filled
PATIENCE_S = 0.2  # to wait for a message in the middle of a round, see [Note: no deadlock]


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
    on_complete: Callable[[int], None]  # called with the index of a bucket whose gradients have all arrived
    hooks: list[RemovableHandle] = attrs.field(factory=list)
    flights: collections.deque[_Flight] = attrs.field(factory=collections.deque)
    kind: Round = Round.NONE
    num_arrived: int = 0  # gradients since the start of the running (or last) round
    plain: collections.Counter[tuple[int, int]] = attrs.field(
        factory=collections.Counter
    )  # by bucket and slot: gradients outside rounds
    order: tuple[int, ...] = ()  # bucket indices in the order of sending
    learnt: tuple[int, ...] = ()  # the same, while no rank misses a gradient
    has_learnt: bool = False  # the ranks have agreed on `learnt`, after a first round
    held: set[int] = attrs.field(factory=set)  # buckets that are sent at the end of the round only
    non_finite_probe: NonFiniteProbe = attrs.field(factory=NonFiniteProbe)
    num_unsent: int = 0  # rounds since the last sending one
    num_scaled: int = 0  # rounds of the running step whose gradients include a factor
    most_bytes: int = 0  # expected maximum of buffers at the end of a backward
    factors: tuple[Factors, ...] = ()  # by bucket
    shared_numel: Mapping[torch.dtype, int] = attrs.field(factory=dict)  # of buffers that serve buckets in turn
    patience_s: float = PATIENCE_S  # to wait for a message in the middle of a round; 0 after a timeout
    _next: int = 0  # position in `order` of the next bucket to send
    _completed: list[int] = attrs.field(factory=list)  # bucket indices in order of completion

    @classmethod
    def create(
        cls,
        layout: Layout,
        policy: ZeroPolicy,
        params: dict[str, Parameter],
        ranks: Ranks,
        device: torch.device,
        on_complete: Callable[[int], None] = lambda index: None,
    ) -> GradientReducer:
        """Hook every parameter of `layout`; `close` removes the hooks.

        on_complete: called with the index of each bucket whose gradients have all arrived in a backward.
        """
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
        reducer = cls(layout, policy, ranks, reductions, gradients, pool, on_complete)
        reducer.order = reducer._last(range(len(gradients)), frozenset())
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

    def finish(self) -> list[torch.Tensor]:
        """Return the accumulators, one per bucket: mean gradients of this rank's span (or of the whole bucket).

        Gradients that plain `loss.backward()` calls left in `.grad`, outside any round, are adopted and sent first.
        """
        if any(gradient.phase is BucketPhase.FILLING or gradient.kept is None for gradient in self.gradients):
            self.adopt_plain(1, is_last=True)
        kept = [gradient.kept for gradient in self.gradients]
        assert all(tensor is not None for tensor in kept)
        return [tensor for tensor in kept if tensor is not None]

    def expect_missing(self, names: Collection[str]) -> None:
        """Send buckets with these parameters last from now on: some rank had no gradient for them.

        names: the same on all ranks.
        """
        if self.has_learnt:
            missing = {b.index for b, s in self.layout.slots() if s.name in names} if names else frozenset[int]()
            self.order = self._last(self.learnt, missing)

    def average(self, averaging: Averaging) -> None:
        """Turn sums over ranks into means by `averaging`; there are no gradients of a step yet."""
        self.policy = attrs.evolve(self.policy, averaging=averaging)
        self.factors = tuple(factors(self.policy, self.layout, bucket) for bucket in self.layout.buckets)
        for gradient, factor in zip(self.gradients, self.factors):
            gradient.factor = factor.on_arrival

    def reset(self) -> None:
        """Receive messages in flight, then drop all gradients, so that the next of each parameter is a first one.

        If the world has failed, it does not wait: nothing arrives any more.
        """
        while self.flights:
            handle = self.flights.popleft().handle
            if not zcomm.failure():
                handle.wait()
        self.kind, self.num_scaled, self.num_unsent = Round.NONE, 0, 0
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
        self.reset()
        self.pool.clear()

    # -- a round ---------------------------------------------------------------------------------

    def _open(self, kind: Round) -> None:
        self.kind, self._next, self.num_arrived = kind, 0, 0
        self._completed.clear()
        for gradient in self.gradients:
            gradient.open_round()

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
        if gradient.phase in (BucketPhase.IN_FLIGHT, BucketPhase.REDUCED):
            gradient.late.add(index)
            self.held.add(gradient.bucket.index)
            return
        self._provide(gradient)
        if gradient.arrive(index):
            self._completed.append(gradient.bucket.index)
            self.on_complete(gradient.bucket.index)
            if self.policy.overlap and self.kind is Round.SENDING:
                self._send_complete()

    def _send_complete(self) -> None:
        while self._next < len(self.order):
            index = self.order[self._next]
            gradient = self.gradients[index]
            if index in self.held or gradient.awaiting or gradient.rows is not None:
                return
            self._send(gradient)
            self._next += 1

    def _close_round(self) -> None:
        self.num_unsent = 0 if self.kind is Round.SENDING else self.num_unsent + 1
        if self.kind is Round.SENDING:
            for index in self.order[self._next :]:
                self._send(self.gradients[index])
            self._next = len(self.order)
            self._finish_flights(0)
            self._send_late(self._late() if self.has_learnt else self._learn())
            self.has_learnt = True
            if self.pool.total_bytes > self.most_bytes:
                self._clear_pool()  # more buckets than expected were filled at once
        for gradient in self.gradients:
            gradient.close_round(is_scaled=self.num_scaled > 0)
        self.kind, self.patience_s = Round.NONE, PATIENCE_S

    def _clear_pool(self) -> None:
        for gradient in self.gradients:
            gradient.forget_views()
        self.pool.clear()

    def _late(self) -> set[int]:
        return {gradient.bucket.index for gradient in self.gradients if gradient.late}

    def _learn(self) -> set[int]:
        """Agree on the order from now on; returns the buckets that some rank must send again.  A collective."""
        completed = list(dict.fromkeys(self._completed))
        incomplete = [index for index in self.order if index not in set(completed)]  # sent at the end of the round
        answers = zcomm.all_gather_object(
            {"order": completed + incomplete, "late": sorted(self._late())}, self.ranks.world
        )
        late = {index for answer in answers for index in answer["late"]}
        self.order = self.learnt = self._last(answers[0]["order"], late)
        self.held |= late
        return late

    def _last(self, order: Iterable[int], late: Collection[int]) -> tuple[int, ...]:
        """Return `order` with buckets that are sent at the end of a round moved to the end: late ones, and rows."""
        return tuple(sorted(order, key=lambda index: (self.gradients[index].rows is not None, index in late)))

    def _send_late(self, indices: set[int]) -> None:
        for index in sorted(indices):
            gradient = self.gradients[index]
            late, gradient.late = sorted(gradient.late), set()
            gradient.phase = BucketPhase.IDLE
            self._provide(gradient)
            for slot in late:
                gradient.arrive(slot)
            self._send(gradient)
            self._finish_flights(0)

    # -- a message -------------------------------------------------------------------------------

    def _provide(self, gradient: BucketGradient) -> None:
        """Give an IDLE bucket a local buffer; waits for one in flight if there are enough."""
        if gradient.phase is not BucketPhase.IDLE or gradient.rows is not None:
            return
        numel, dtype, capacity = gradient.bucket.numel, gradient.local_dtype, self._capacity(gradient)
        buffer = self.pool.reuse(numel, dtype, capacity)
        while buffer is None and len(self.flights) >= IN_FLIGHT_LIMIT and self._may_wait():
            self._finish_flights(len(self.flights) - 1)
            buffer = self.pool.reuse(numel, dtype, capacity)
        if buffer is None:
            buffer = self.pool.make(capacity, dtype)
        gradient.adopt(buffer)

    def _may_wait(self) -> bool:
        """Wait for the oldest message; False: allocate another buffer, see [Note: no deadlock]."""
        # the forward and backward passes have collectives of their own
        communicates = self.policy.shards_weights or self.layout.is_expert_sharded
        if not communicates or self.flights[0].handle.wait_for(self.patience_s):
            return True
        self.patience_s = 0.0
        return False

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
        sent = local if self.layout.world_size == 1 else local.to(wire)
        if before != 1.0:
            sent.mul_(before)
        label = f"gradients[{gradient.bucket.index}]"
        exchange = self.reductions[gradient.bucket.num_expert_shards]
        handle, received = exchange.reduce(sent, gradient.bucket.span(self.ranks.rank), label)
        self.flights.append(_Flight(gradient, handle, sent, received))
        self._finish_ready()

    def _send_rows(self, gradient: BucketGradient, rows: SparseRows) -> None:
        """Exchange the rows of a sparse gradient; waits, because the lengths must be known."""
        self._finish_flights(0)  # another rank may first wait for the second phase of a message (hybrid sums)
        bucket = gradient.bucket
        before, after = self.policy.averaging.factors(self.layout.world_size)
        indices, values = rows.packed(self.policy.wire_for(bucket), self.pool.device)
        parts = zcomm.gather_rows(indices, values, self.ranks.groups_for(bucket).world, label=f"rows[{bucket.index}]")
        gradient.keep_rows(parts, self.ranks.rank, factor=before * after)

    def _finish_ready(self) -> None:
        """Move received gradients to the host, if they belong there; waits for all but the newest."""
        while (on := self.flights) and on[-1].gradient.mover:
            if not (on[0].handle.is_done() or (len(on) > 1 and self._may_wait())):
                return
            self._finish_flights(len(on) - 1)

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
    whole gradients are kept and reduced after each backward, both from the second backward of a step on.
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
