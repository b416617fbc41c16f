"""One gradient reducer for stages 0, 1 and 2.

Problem.  Gradients arrive in an order that autograd decides, some never arrive, some arrive twice in one
backward (re-entrant checkpointing of shared weights); but all ranks must issue the same collectives in the
same order, or they hang or mix their sums.

Design.  A backward is a *round*.  In a sending round every bucket is sent exactly once, in one order that all ranks
share, whatever arrived: as soon as a bucket and all before it are complete, and at the end of the round for the rest,
with zeros for what is missing.  So the sequence of collectives does not depend on what a rank computed.

After the first sending round, in index order, the ranks learn from it with one exchange: the order in which buckets
became complete (rank 0's is taken by all), and which buckets got a gradient after they had left, on any rank.  Those
form a second message now, sums being linear, and are held back until the end of the round ever after, behind the
others.  A gradient that comes twice for the first time in a later round forms a second message too; there, ranks must
do alike.  A bucket that some rank missed a gradient of in one step is the last to leave in the next (`expect`), or
those behind it would wait, each in a buffer.

Outside a round the hooks do nothing, as when a GAN's generator trains through its discriminator: `.grad` behaves as
it does in plain torch.  At most `IN_FLIGHT_LIMIT` buckets travel at once, which bounds memory when gradients are
sharded.

[Note: no wait in a circle]  A rank that misses a gradient sends its bucket at the end of the round, and until then
the others must come along: at stage 3, to gather units; with experts, to exchange tokens.  So nobody may wait for
that bucket in the middle of a round: after `PATIENCE_S` in vain a rank takes further buffers for the rest of the
round, and drops them at its end.  Rows, whose exchange waits for their lengths, are sent last of all, at the end.

Rejected.  Counting expected contributions per parameter (wrong as soon as control flow depends on data);
launching buckets in order of completion (differs between ranks); autograd's private end-of-backward
callback (`queue_callback`): the caller knows when backward has returned, as a context manager.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
from zpartition.layout.policy import ReduceAt, ZeroPolicy
from zpartition.layout.ranks import Ranks
from zpartition.memory.buffers import Arena, BufferPool

IN_FLIGHT_LIMIT = 2  # transient buffers travelling at once: one being sent, one being filled behind it


PATIENCE_S = 0.2


@attrs.frozen(eq=False)
class _Flight:
    """A bucket on the wire; its tensors must live until `wait` has returned."""

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

    Invariant between rounds: `flights` is empty and every bucket is IDLE, SETTLED or (accumulating locally)
    FILLING.
    """

    layout: Layout
    policy: ZeroPolicy
    ranks: Ranks
    reductions: Mapping[int, GradientReduction]  # by `Bucket.num_expert_shards`
    gradients: tuple[BucketGradient, ...]
    pool: BufferPool
    tell: Callable[[int], None]  # told of buckets whose gradients have all arrived
    hooks: list[RemovableHandle] = attrs.field(factory=list)
    flights: collections.deque[_Flight] = attrs.field(factory=collections.deque)
    kind: Round = Round.NONE
    num_arrived: int = 0  # gradients since the running (or last) round was opened
    order: tuple[int, ...] = ()  # bucket indices in the order of sending
    learnt: tuple[int, ...] = ()  # the same, while no rank misses a gradient
    has_learnt: bool = False  # whether the ranks have agreed on that order after a first round
    held: set[int] = attrs.field(factory=set)  # buckets that leave at the end of the round only
    non_finite_probe: NonFiniteProbe = attrs.field(factory=NonFiniteProbe)
    num_unsent: int = 0  # rounds since the last sending one
    num_scaled: int = 0  # rounds of the running step whose gradients carry a factor
    most_bytes: int = 0  # that buffers ought to take at the end of a backward
    factors: tuple[Factors, ...] = ()  # by bucket
    patience_s: float = PATIENCE_S  # how long to wait for a message in the middle of a round; 0 once that was in vain
    _next: int = 0  # position in `order` of the bucket to be sent next
    _completed: list[int] = attrs.field(factory=list)  # bucket indices in the order in which they became complete

    @classmethod
    def create(
        cls,
        layout: Layout,
        policy: ZeroPolicy,
        params: dict[str, Parameter],
        ranks: Ranks,
        device: torch.device,
        tell: Callable[[int], None] = lambda index: None,
    ) -> GradientReducer:
        """Hook every parameter of `layout`; `close` takes the hooks away again.

        `tell` is given the index of each bucket whose gradients have all arrived in a backward.
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
        reducer = cls(layout, policy, ranks, reductions, gradients, pool, tell)
        reducer.order = reducer._last(range(len(gradients)), frozenset())
        reducer.most_bytes = buffer_bytes(layout, policy, num_backwards=2)
        reducer.factors = tuple(factors(policy, layout, bucket) for bucket in layout.buckets)
        for gradient in gradients:
            for index, param in enumerate(gradient.params):
                hook = _hook(weakref.ref(reducer), weakref.ref(gradient), index)
                handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                reducer.hooks.append(handle)
        return reducer

    @contextmanager
    def round(self, *, is_last: bool, is_local: bool = False, is_scaled: bool = False) -> Iterator[None]:
        """One backward; on return all its messages have been received.  `is_local`: it sends none.

        is_scaled: its gradients carry a factor, so no parameter shows them.

        An exception inside forgets the gradients of the whole step, since what was accumulated before cannot
        be told from what the failed backward added.
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
        """The accumulators, one per bucket: mean gradients of this rank's span (or of the whole bucket).

        What plain `loss.backward()` calls left in `.grad`, outside of any round, is taken and sent first.
        """
        if any(gradient.phase is BucketPhase.FILLING or gradient.kept is None for gradient in self.gradients):
            with self.round(is_last=True):
                self._take_plain()
        kept = [gradient.kept for gradient in self.gradients]
        assert all(tensor is not None for tensor in kept)
        return [tensor for tensor in kept if tensor is not None]

    def expect(self, missing: Collection[str]) -> None:
        """Between steps: on some rank no gradient came for `missing`; the same names on all ranks."""
        if self.has_learnt:
            self.order = self._last(self.learnt, {b.index for b, s in self.layout.slots() if s.name in missing})

    def reset(self) -> None:
        """Receive what is on the wire, then forget all gradients: the next of each parameter is a first one.

        Where the world has failed nothing comes any more, and who asks for this has said or heard why.
        """
        while self.flights:
            handle = self.flights.popleft().handle
            if not zcomm.failure():
                handle.wait()
        self.kind, self.num_scaled, self.num_unsent = Round.NONE, 0, 0
        self.non_finite_probe.step_over()
        for gradient in self.gradients:
            gradient.reset()

    def _take_plain(self) -> None:
        for gradient in self.gradients:
            for index in range(len(gradient.params)):
                if gradient.has_plain(index):
                    gradient.check_unedited(index)
                    self._provide(gradient)
                    gradient.arrive(index)

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
        """Autograd has put a gradient into `params[index].grad`."""
        if self.kind is Round.NONE:
            if gradient.shows_kept(index):
                raise HiddenGradientError(ADDED)
            if self.layout.world_size > 1:
                gradient.note_plain(index)
            return
        self.num_arrived += 1
        if gradient.phase in (BucketPhase.IN_FLIGHT, BucketPhase.REDUCED):
            gradient.late.add(index)
            self.held.add(gradient.bucket.index)
            return
        self._provide(gradient)
        if gradient.arrive(index):
            self._completed.append(gradient.bucket.index)
            self.tell(gradient.bucket.index)
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
                self._clear_pool()  # more buckets were open at a time than there ought to be
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
        """Agree on the order from now on and on the buckets that some rank must send again; returns these."""
        completed = list(dict.fromkeys(self._completed))
        resting = [index for index in self.order if index not in set(completed)]  # waited for until the end: last
        answers = zcomm.all_gather_object(
            {"order": completed + resting, "late": sorted(self._late())}, self.ranks.world
        )
        late = {index for answer in answers for index in answer["late"]}
        self.order = self.learnt = self._last(answers[0]["order"], late)
        self.held |= late
        return late

    def _last(self, order: Iterable[int], late: Collection[int]) -> tuple[int, ...]:
        """`order` with those that wait for the end of the round at its end: `late` ones, and rows."""
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
        """Give an IDLE bucket a local buffer, waiting for one on the wire if enough are travelling."""
        if gradient.phase is not BucketPhase.IDLE or gradient.rows is not None:
            return
        numel, dtype = gradient.bucket.numel, gradient.local_dtype
        buffer = self.pool.reuse(numel, dtype)
        if buffer is None and len(self.flights) >= IN_FLIGHT_LIMIT and self._may_wait():
            self._finish_flights(IN_FLIGHT_LIMIT - 1)
            buffer = self.pool.reuse(numel, dtype)
        if buffer is None:
            buffer = self.pool.make(self._capacity(gradient), dtype)
        gradient.adopt(buffer)

    def _may_wait(self) -> bool:
        """Wait for the oldest message; False to allocate another buffer: [Note: no wait in a circle]."""
        talks = (
            self.policy.shards_weights or self.layout.is_expert_sharded
        )  # in the middle of a round, with other ranks
        if not talks or self.flights[0].handle.wait_for(self.patience_s):
            return True
        self.patience_s = 0.0
        return False

    def _capacity(self, gradient: BucketGradient) -> int:
        """Elements of a new buffer: the first few fit any bucket of a dtype, in turn; more are made to measure.

        Where whole gradients are kept, those of a second backward are the ones that serve all.
        """
        goes_on = self.layout.num_shards > 1 or self.policy.offload.moves_states
        serve_all = goes_on and self.pool.num_made <= IN_FLIGHT_LIMIT
        serve_all &= reduce_at(self.policy, self.layout) is ReduceAt.MICRO_STEP
        serve_all |= gradient.borrowed is not None
        served = (b.numel for b in self.layout.buckets if b.dtype == gradient.bucket.dtype)
        return max(served) if serve_all else gradient.bucket.numel

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
        """Exchange what was looked up, and wait for it: the lengths have to be known."""
        self._finish_flights(0)  # another rank may wait for what follows a message (hybrid sums) before it comes here
        bucket = gradient.bucket
        before, after = self.policy.averaging.factors(self.layout.world_size)
        indices, values = rows.packed(self.policy.wire_for(bucket), self.pool.device)
        parts = zcomm.gather_rows(indices, values, self.ranks.groups_for(bucket).world, label=f"rows[{bucket.index}]")
        gradient.keep_rows(parts, self.ranks.rank, factor=before * after)

    def _finish_ready(self) -> None:
        """Gradients that go to the host leave as soon as they are off the wire; all but the newest in any case."""
        while (on := self.flights) and on[-1].gradient.mover and (len(on) > 1 or on[0].handle.is_done()):
            self._finish_flights(len(on) - 1)

    def _finish_flights(self, leave: int) -> None:
        """Wait for the oldest messages until `leave` are on the wire."""
        while len(self.flights) > leave:
            flight = self.flights.popleft()
            bucket = flight.gradient.bucket
            flight.finish(self.factors[bucket.index].after, self.policy.accumulate_for(bucket.dtype))


def _hook(
    reducer: weakref.ref[GradientReducer], gradient: weakref.ref[BucketGradient], index: int
) -> Callable[[torch.Tensor], None]:
    """A hook that keeps nothing alive: the garbage collector does not see through autograd's hooks."""

    def arrived(_param: torch.Tensor) -> None:
        owner, own = reducer(), gradient()
        if owner is not None and own is not None:
            owner._arrived(own, index)

    return arrived


def buffer_bytes(layout: Layout, policy: ZeroPolicy, num_backwards: int = 1) -> int:
    """The most that buffers of gradients need: one for each bucket where they are kept or fill over micro-steps, else
    a few for all.  Whoever keeps whole gradients needs both from the second backward of a step on.
    """
    if not layout.buckets:
        return 0
    fills = reduce_at(policy, layout) is ReduceAt.BOUNDARY
    dense = [bucket for bucket in layout.buckets if not bucket.is_sparse]
    sizes = [b.numel * (policy.accumulate_for(b.dtype) if fills else b.dtype).itemsize for b in dense]
    kinds = {bucket.dtype for bucket in dense}  # no buffer serves two
    few = (IN_FLIGHT_LIMIT + 1) * sum(max(s for b, s in zip(dense, sizes) if b.dtype == kind) for kind in kinds)
    if layout.num_shards == 1 and not policy.offload.moves_all_states:
        return sum(sizes) + (few if num_backwards > 1 else 0)
    return sum(sizes) if fills else few
