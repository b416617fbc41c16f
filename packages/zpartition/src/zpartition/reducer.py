"""One gradient reducer for stages 0, 1 and 2.

Problem.  Gradients arrive in an order that autograd decides, some never arrive, some arrive twice in one
backward (re-entrant checkpointing of shared weights); but all ranks must issue the same collectives in the
same order, or they hang or mix their sums.

Design.  A backward is a *round*.  In a reducing round every bucket is sent exactly once, in index order,
whatever arrived: as soon as a bucket and all before it are complete, and at the end of the round for the
rest, with zeros for what is missing.  So the sequence of collectives is a function of the layout alone.  What
arrives after its bucket has left forms a second message of that bucket at the end of the round; sums are
linear.  At most `IN_FLIGHT_LIMIT` transient buffers travel at once, which bounds memory when gradients are
sharded.

Rejected.  Counting expected contributions per parameter (wrong as soon as control flow depends on data);
launching buckets in order of completion (differs between ranks); autograd's private end-of-backward
callback (`queue_callback`): the caller knows when backward has returned, as a context manager.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

import attrs
import torch
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

import zcomm
from zpartition.buffers import BufferPool
from zpartition.gradient import BucketGradient, Phase
from zpartition.layout import Layout
from zpartition.policy import ReduceAt, ZeroPolicy

IN_FLIGHT_LIMIT = 2  # transient buffers travelling at once: one being sent, one being filled behind it


class Round(enum.Enum):
    """What the backward that is running does with its gradients."""

    NONE = "none"  # no backward is running
    LOCAL = "local"  # accumulates on this rank: costs a full local gradient until a SENDING round
    SENDING = "sending"  # every bucket is sent once, in index order


@attrs.frozen(eq=False)
class _Flight:
    """A bucket on the wire; its tensors must live until `wait` has returned."""

    gradient: BucketGradient
    handle: zcomm.Handle
    sent: torch.Tensor  # (bucket.numel,) wire dtype
    received: torch.Tensor  # (bucket.numel,) or (span_numel,) wire dtype

    def settle(self, factor: float, dtype: torch.dtype) -> None:
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
    group: ProcessGroup | None
    gradients: tuple[BucketGradient, ...]
    pool: BufferPool
    rank: int  # within `group`
    hooks: list[RemovableHandle] = attrs.field(factory=list)
    flights: collections.deque[_Flight] = attrs.field(factory=collections.deque)
    kind: Round = Round.NONE
    num_arrived: int = 0  # gradients since the running (or last) round was opened
    _next: int = 0  # index of the bucket to be sent next

    @classmethod
    def create(
        cls,
        layout: Layout,
        policy: ZeroPolicy,
        params: dict[str, Parameter],
        group: ProcessGroup | None,
        device: torch.device,
    ) -> GradientReducer:
        """Hook every parameter of `layout`; `close` takes the hooks away again."""
        pool = BufferPool(device)
        accumulating = _reduce_at(policy, layout) is ReduceAt.BOUNDARY
        gradients = tuple(
            BucketGradient(
                bucket=bucket,
                params=tuple(params[slot.name] for slot in bucket.slots),
                local_dtype=policy.accumulate_for(bucket.dtype) if accumulating else bucket.dtype,
                pool=pool,
            )
            for bucket in layout.buckets
        )
        reducer = cls(layout, policy, group, gradients, pool, zcomm.group_rank(group))
        for gradient in gradients:
            for index, param in enumerate(gradient.params):
                hook = reducer._hook(gradient, index)
                handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                reducer.hooks.append(handle)
        return reducer

    @contextmanager
    def round(self, *, is_last: bool) -> Iterator[None]:
        """One backward; on return all its messages have been received.

        An exception inside forgets the gradients of the whole step, since what was accumulated before cannot
        be told from what the failed backward added.
        """
        sending = is_last or _reduce_at(self.policy, self.layout) is ReduceAt.MICRO_STEP
        self._open(Round.SENDING if sending else Round.LOCAL)
        try:
            yield
            self._close_round()
        except BaseException:
            self.abort()
            raise

    def finish(self) -> list[torch.Tensor]:
        """The accumulators, one per bucket: mean gradients of this rank's span (or of the whole bucket).

        Outside `round` (a plain `loss.backward()`) this also sends what has not been sent.
        """
        if self.kind is not Round.NONE:
            self._close_round()
        if any(gradient.phase is Phase.FILLING or gradient.kept is None for gradient in self.gradients):
            self._open(Round.SENDING)
            self._close_round()
        kept = [gradient.kept for gradient in self.gradients]
        assert all(tensor is not None for tensor in kept)
        return [tensor for tensor in kept if tensor is not None]

    def reset(self) -> None:
        """Forget all gradients: the next one of each parameter is a first one."""
        for gradient in self.gradients:
            gradient.reset()

    def abort(self) -> None:
        """After a failed backward: receive what is on the wire, then forget everything."""
        while self.flights:
            self.flights.popleft().handle.wait()
        self.kind = Round.NONE
        self.reset()

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
        for gradient in self.gradients:
            gradient.open_round()

    def _hook(self, gradient: BucketGradient, index: int) -> Callable[[torch.Tensor], None]:
        def arrived(_param: torch.Tensor) -> None:
            if self.kind is Round.NONE:  # a plain loss.backward(), outside `round`
                self._refuse_after_reduction()
                self._open(Round.SENDING)
            self.num_arrived += 1
            if gradient.phase in (Phase.IN_FLIGHT, Phase.SETTLED):
                gradient.late.add(index)
                return
            self._provide(gradient)
            if gradient.arrive(index) and self.policy.overlap and self.kind is Round.SENDING:
                self._send_complete()

        return arrived

    def _refuse_after_reduction(self) -> None:
        if any(gradient.kept is not None for gradient in self.gradients):
            raise RuntimeError(
                "a backward outside micro_step() after the gradients of this step were reduced would mix local and "
                "reduced values: call zero_grad() first, or run every backward of the step inside micro_step()"
            )

    def _send_complete(self) -> None:
        while self._next < len(self.gradients) and not self.gradients[self._next].awaiting:
            self._send(self.gradients[self._next])
            self._next += 1

    def _close_round(self) -> None:
        if self.kind is Round.SENDING:
            for gradient in self.gradients[self._next :]:
                self._send(gradient)
            self._next = len(self.gradients)
            self._settle(0)
            self._send_late()
            for gradient in self.gradients:
                gradient.attach_grads()
        self.kind = Round.NONE

    def _send_late(self) -> None:
        for gradient in self.gradients:
            if gradient.late:
                late, gradient.late = sorted(gradient.late), set()
                gradient.phase = Phase.IDLE
                self._provide(gradient)
                for index in late:
                    gradient.arrive(index)
                self._send(gradient)
                self._settle(0)

    # -- a message -------------------------------------------------------------------------------

    def _provide(self, gradient: BucketGradient) -> None:
        """Give an IDLE bucket a local buffer, waiting for one on the wire if enough are travelling."""
        if gradient.phase is not Phase.IDLE:
            return
        numel, dtype = gradient.bucket.numel, gradient.local_dtype
        buffer = self.pool.take(numel, dtype)
        if buffer is None and len(self.flights) >= IN_FLIGHT_LIMIT:
            self._settle(IN_FLIGHT_LIMIT - 1)
            buffer = self.pool.take(numel, dtype)
        if buffer is None:
            shared = self.layout.num_shards > 1  # then any bucket may use it later: make it fit the largest
            buffer = self.pool.make(max(b.numel for b in self.layout.buckets) if shared else numel, dtype)
        gradient.adopt(buffer)

    def _send(self, gradient: BucketGradient) -> None:
        self._provide(gradient)
        wire = self.policy.reduce_dtype or gradient.bucket.dtype
        before, _ = self.policy.averaging.factors(self.layout.world_size)
        local = gradient.seal()
        sent = local if self.layout.world_size == 1 else local.to(wire)
        if before != 1.0:
            sent.mul_(before)
        label = f"gradients[{gradient.bucket.index}]"
        if self.layout.num_shards == 1:
            received = sent
            handle = zcomm.all_reduce(sent, self.group, async_op=True, label=label)
        else:
            received = sent[slice(*gradient.bucket.span(self.rank))]  # in place: nothing else is needed of `sent`
            handle = zcomm.reduce_scatter(received, sent, self.group, async_op=True, label=label)
        self.flights.append(_Flight(gradient, handle, sent, received))

    def _settle(self, leave: int) -> None:
        """Wait for the oldest messages until `leave` are on the wire."""
        _, after = self.policy.averaging.factors(self.layout.world_size)
        while len(self.flights) > leave:
            flight = self.flights.popleft()
            flight.settle(after, self.policy.accumulate_for(flight.gradient.bucket.dtype))


def _reduce_at(policy: ZeroPolicy, layout: Layout) -> ReduceAt:
    """When to reduce; alone, there is nothing to exchange and gradients simply accumulate."""
    return ReduceAt.BOUNDARY if layout.world_size == 1 else policy.reduce_at
