"""Rounds of local steps between replica groups (DiLoCo: Douillard et al. 2023; Streaming DiLoCo: 2025).

Each replica group trains by itself; no gradient leaves it.  Every `sync_every` steps the groups exchange how far they
have moved, the *outer gradient* start - local, where `start` are the weights of the last exchange.  The mean of these
is the gradient of an outer SGD with Nesterov momentum, whose result is the new `start` on every group, and from there
the groups go on.  So a round sends 1 / sync_every of the bytes of a gradient per step.

- Fragments (fragments.py) are exchanged in turn, each once in `sync_every` steps: a step sends at most 1 / fragments.
- With a `delay` the message of a fragment has so many steps to arrive, and training does not wait for it.  The local
  steps meanwhile are mixed in: local <- lerp(start, local, merge_alpha).
- Outer gradients travel as float32, or in 4 or 8 bits with a scale per block (`zcomm.BlockCode`): each group sums one
  part in float32, in the order of the groups, and sends the mean encoded once more, so all groups decode equal bits.

A model that has learnt nothing moves in other directions in each group, so published runs begin with data
parallelism.  With a `start` the groups average their gradients in the first steps, like one group, and the first
round begins then.

Ranks of equal index in their groups hold equal shards, so each exchanges its own with these alone, at every stage.

Memory of a rank: start and momentum, float32, each as large as its masters; a message is as large as its part of one
fragment.  They are where the masters are.

Rejected: gradients of a wrapper around the optimizer, which would see other shards at every stage; a message per
tensor; one bucket of weights as the unit of a fragment, since buckets follow the order of backward and not layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import final

import attrs
import torch
from attrs.validators import ge, gt, in_, le
from torch import Tensor
from torch.distributed import ProcessGroup

import zcomm
from zpartition.layout.address import LazyShard, Shard, cut
from zpartition.layout.policy import Tier
from zpartition.partition import Partition
from zpartition.rounds.fragments import Segment, plan_fragments

__all__ = ["OuterExchange", "RoundPolicy", "Rounds", "outer_step", "owner_names"]

START = "start"  # a kind of shards


@attrs.frozen(kw_only=True)
class RoundPolicy:
    """How replica groups exchange weights.

    Raises:
        ValueError: more fragments than steps in a round; or a delay that reaches the next exchange.
    """

    start: int = attrs.field(default=0, validator=ge(0))  # first steps, in which groups average their gradients
    sync_every: int = attrs.field(default=50, validator=ge(1))  # steps between two exchanges of a fragment
    num_fragments: int = attrs.field(default=1, validator=ge(1))
    lr: float = attrs.field(default=0.7, validator=gt(0))  # of the outer SGD
    momentum: float = attrs.field(default=0.9, validator=[ge(0), le(1)])
    nesterov: bool = True
    delay: int = attrs.field(default=0, validator=ge(0))  # steps in which the message of a fragment may arrive
    merge_alpha: float = attrs.field(default=0.0, validator=[ge(0), le(1)])  # weight of the local weights
    bits: int = attrs.field(default=0, validator=in_((0, 4, 8)))  # of an outer gradient on the wire; 0: float32

    def __attrs_post_init__(self) -> None:
        if self.num_fragments > self.sync_every:
            raise ValueError(
                f"{self.num_fragments} fragments need a round of at least as many steps, and sync_every is "
                f"{self.sync_every}: use {self.sync_every} fragments at most."
            )
        between = self.sync_every // self.num_fragments
        if self.delay >= between:
            raise ValueError(
                f"a delay of {self.delay} steps reaches the next exchange, {between} steps later (sync_every "
                f"{self.sync_every} / {self.num_fragments} fragments): use a delay of {between - 1} at most."
            )

    def begins(self, step: int) -> int:
        """Return the fragment whose exchange begins after `step` steps; -1 if none does."""
        if step <= self.start:
            return -1
        position = (step - self.start - 1) % self.sync_every + 1
        fragment = position * self.num_fragments // self.sync_every - 1
        return fragment if position == self._offset(fragment) else -1

    def _offset(self, fragment: int) -> int:
        """Return the step in a round, from 1, after which the exchange of `fragment` begins."""
        return -(-(fragment + 1) * self.sync_every // self.num_fragments)


def owner_names(is_on_host: bool) -> tuple[str, ...]:
    """Return the owners of the outer state's bytes: weights, momentum, the gradient of a fragment."""
    place = "host " if is_on_host else ""
    return tuple(f"{place}outer {what}" for what in ("weights", "momentum", "gradient"))


def outer_step(start: Tensor, momentum: Tensor, gradient: Tensor, policy: RoundPolicy) -> None:
    """Update `start` and `momentum` in place by SGD, as torch.optim.SGD does, bit for bit.  All (n,), one dtype."""
    momentum.mul_(policy.momentum).add_(gradient)
    direction = gradient.add(momentum, alpha=policy.momentum) if policy.nesterov else momentum
    start.add_(direction, alpha=-policy.lr)


@final
@attrs.define(eq=False)
class _Fragment:
    """Outer state of one fragment on this rank."""

    segments: tuple[Segment, ...]
    start: Tensor  # (numel,) weights of the last exchange, equal in all groups
    momentum: Tensor  # (numel,) of the outer optimizer, equal in all groups


@final
@attrs.define(eq=False)
class OuterExchange:
    """Mean outer gradient of one fragment, in flight: one message, or two.

    Invariant: `mean` has its values once the last handle is done.
    """

    fragment: int
    ends: int  # number of steps after which it is applied
    mean: Tensor  # (numel,) on the state's device
    handle: zcomm.Handle  # of the message that was sent last
    send_second: Callable[[], zcomm.Handle] | None = None  # once the first has arrived; None: there is no further one
    second_at: int = 0  # number of steps after which the second one is sent

    def proceed(self, step: int) -> None:
        """Send the second message, if that is due."""
        if self.send_second is not None and step >= self.second_at:
            self.handle.wait()
            self.handle, self.send_second = self.send_second(), None

    def wait(self) -> None:
        """Wait for all messages."""
        self.proceed(self.ends)
        self.handle.wait()


@final
class Rounds:
    """Outer optimizer of one partition.  Call `step_end` after each step, on all ranks of all groups.

    group: ranks of equal index in the replica groups, one of each.

    Making it is a collective of the groups: all begin with the weights, frozen ones included, and buffers of the
    first.

    Raises:
        ValueError: masters are on disk.
    """

    def __init__(self, partition: Partition, group: ProcessGroup | None, policy: RoundPolicy) -> None:
        if any(storage.placement.tier is Tier.DISK for storage in partition.storages):
            raise ValueError(
                "rounds of local steps need the master weights in memory, and they are on disk "
                "(Offload(states=Tier.DISK)). Use Tier.HOST."
            )
        self.partition, self.group, self.policy = partition, group, policy
        self.size = zcomm.group_size(group)
        self._pending: OuterExchange | None = None
        self._num_params = len(partition.params)
        pieces = [tuple(storage.pieces(partition.rank)) for storage in partition.storages]
        segments = plan_fragments(pieces, tuple(partition.params), policy.num_fragments)
        masters = [storage.master for storage in partition.storages]
        devices = {master.device.type: master.device for master in masters}
        self._device = devices.get("cpu", partition.device)
        self._dtype = torch.float64 if any(m.dtype == torch.float64 for m in masters) else torch.float32
        self._fragments = [self._make(own) for own in segments]
        self._begin_equal()

    # -- a step ----------------------------------------------------------------------------------

    def step_end(self, step: int) -> bool:
        """Begin and end the exchanges that are due after `step` steps; return whether weights have changed.

        Raises ValueError if parameters were unfrozen since the rounds began.
        """
        if len(self.partition.params) != self._num_params:
            raise ValueError(
                "parameters were unfrozen after the rounds of local steps began, which do not exchange them: "
                "unfreeze them (requires_grad_(True)) before."
            )
        if 0 < step == self.policy.start:
            self._begin_equal()
            return True
        ended = self._end_due(step)
        fragment = self.policy.begins(step)
        if fragment >= 0:
            if self._pending is not None:  # of a checkpoint with longer rounds: it is applied early
                ended = self._end_due(self._pending.ends)
            self._pending = self._begin(fragment, step + self.policy.delay)
        elif self._pending is not None:
            self._pending.proceed(step)
        return self._end_due(step) or ended

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Replace the reduced gradients by their mean over the groups, before the first round; a collective.

        Each group counts alike.  A parameter that a group has not used stays as it is there; the first round begins
        with the weights of the first group.
        """
        if self.size == 1:
            return
        for gradient, storage in zip(self.partition.reducer.gradients, self.partition.storages):
            kept, own = gradient.kept, storage.master.grad
            assert kept is not None, "call finish_gradients first"
            assert own is not None
            mean = kept.to(self.partition.device)
            zcomm.all_reduce(mean, self.group, label=f"gradients of all groups[{storage.bucket.index}]")
            mean.div_(self.size)
            for held in (kept, own):
                if held.data_ptr() != mean.data_ptr():
                    held.copy_(mean)

    def _begin(self, fragment: int, ends: int) -> OuterExchange:
        held = self._fragments[fragment]
        gradient = torch.empty_like(held.start)
        for segment, local in self._local(held):
            torch.sub(held.start[segment.place], local.to(self._device), out=gradient[segment.place])
        message = gradient.to(self.partition.device)
        label = f"outer gradient[{fragment}]"
        if self.policy.bits and self.size > 1:
            return self._begin_quantized(fragment, ends, message, label)
        sent = zcomm.all_reduce(message, self.group, async_op=True, label=label)

        def finish() -> None:
            gradient.copy_(message.div_(self.size))

        return OuterExchange(fragment, ends, gradient, zcomm.after(sent, finish))

    def _begin_quantized(self, fragment: int, ends: int, message: Tensor, label: str) -> OuterExchange:
        code = zcomm.BlockCode(bits=self.policy.bits)
        part_numel = -(-message.numel() // (self.size * code.block)) * code.block
        padded = message.new_zeros(self.size * part_numel)
        padded[: message.numel()] = message
        own, numel = message.new_empty(part_numel), message.numel()
        mean = torch.empty(numel, dtype=self._dtype, device=self._device)
        reduced = zcomm.reduce_scatter_quantized(own, padded, self.group, code=code, async_op=True, label=label)

        def finish() -> None:
            mean.copy_(padded[:numel])

        def send_mean() -> zcomm.Handle:
            encoded = code.encode(own.div_(self.size))
            sent = zcomm.all_gather_quantized(
                padded, encoded, self.group, code=code, async_op=True, label=f"{label} mean"
            )
            return zcomm.after(sent, finish)

        return OuterExchange(fragment, ends, mean, reduced, send_mean, ends - self.policy.delay // 2)

    def _end_due(self, step: int) -> bool:
        """Apply the exchange that is due, if there is one."""
        pending = self._pending
        if pending is None or step < pending.ends:
            return False
        pending.wait()
        self._pending = None
        held = self._fragments[pending.fragment]
        outer_step(held.start, held.momentum, pending.mean, self.policy)
        self._write(held, self.policy.merge_alpha)
        self.partition.publish()
        return True

    # -- weights ---------------------------------------------------------------------------------

    def _make(self, segments: tuple[Segment, ...]) -> _Fragment:
        numel = sum(segment.numel for segment in segments)
        start, momentum = torch.zeros(2, numel, dtype=self._dtype, device=self._device)
        return _Fragment(segments, start, momentum)

    def _local(self, held: _Fragment) -> Iterator[tuple[Segment, Tensor]]:
        """Yield the live local weights of each segment, in the masters' dtype."""
        for segment in held.segments:
            storage = self.partition.storages[segment.storage]
            yield segment, storage.placement.values(storage.master)[segment.start : segment.start + segment.numel]

    def _write(self, held: _Fragment, alpha: float) -> None:
        """Set local <- lerp(start, local, alpha)."""
        for segment, local in self._local(held):
            storage, new = self.partition.storages[segment.storage], held.start[segment.place]
            if alpha:
                new = torch.lerp(new, local.to(new), alpha)
            storage.placement.write(storage.master, segment.start, new)

    def _begin_equal(self) -> None:
        """Give all groups the first one's weights and buffers."""
        for index, held in enumerate(self._fragments):
            for segment, local in self._local(held):
                held.start[segment.place] = local
            first = held.start.to(self.partition.device)
            zcomm.broadcast(first, self.group, label=f"first weights[{index}]")
            held.start.copy_(first)
            self._write(held, 0.0)
        for storage in self.partition.frozen:
            values = storage.placement.values(storage.master)
            frozen = values.to(self.partition.device)
            zcomm.broadcast(frozen, self.group, label=f"frozen weights[{storage.bucket.index}]")
            storage.placement.write(storage.master, 0, frozen)
        for name, tensor in self.partition.replicated.tensors():
            whole = tensor.detach().contiguous()
            zcomm.broadcast(whole, self.group, label=name)
            tensor.detach().copy_(whole)
        self.partition.publish()

    # -- state -----------------------------------------------------------------------------------

    def follow(self) -> None:
        """Let the weights of the last exchange be the local ones, before the first round."""
        for held in self._fragments:
            for segment, local in self._local(held):
                held.start[segment.place] = local

    def shards(self, kind: str = START) -> Iterator[Shard]:
        """Yield the outer state with its addresses: live memory, to save or to load into; equal in all groups.

        kind: "start": the weights of the last exchange; or "momentum".
        """
        for held in self._fragments:
            yield from _shards(held, held.start if kind == START else held.momentum)

    def pending_shards(self) -> Iterator[Shard | LazyShard]:
        """Yield the mean outer gradient of the exchange in flight, to save; nothing if none is.

        Waits for its messages.  Other fragments are zeros: a checkpoint holds whole tensors.
        """
        if self._pending is None:
            return
        self._pending.wait()
        yield from self.shards_of(self._pending)
        for index, held in enumerate(self._fragments):
            if index != self._pending.fragment:
                yield from _zero_shards(held)

    @property
    def pending(self) -> tuple[int, int]:
        """Fragment in flight, and the number of steps after which it is applied; (-1, 0) if none is."""
        return (-1, 0) if self._pending is None else (self._pending.fragment, self._pending.ends)

    def stage(self, fragment: int, ends: int) -> OuterExchange:
        """Return an exchange as `pending` described it, whose mean is to be loaded into `shards_of`.

        Raises:
            ValueError: there is no such fragment.
        """
        if not 0 <= fragment < len(self._fragments):
            raise ValueError(f"fragment {fragment} is in flight, and there are {len(self._fragments)}")
        return OuterExchange(fragment, ends, torch.zeros_like(self._fragments[fragment].start), zcomm.DONE)

    def shards_of(self, exchange: OuterExchange) -> Iterator[Shard]:
        """Yield the mean outer gradient of `exchange`, with its addresses."""
        return _shards(self._fragments[exchange.fragment], exchange.mean)

    def resume(self, exchange: OuterExchange) -> None:
        """Continue with a staged exchange in flight."""
        self.drop_pending()
        self._pending = exchange

    def reset(self) -> None:
        """Clear the momentum, and drop the exchange in flight."""
        self.drop_pending()
        for held in self._fragments:
            held.momentum.zero_()

    def restart(self) -> None:
        """Begin anew at the present weights of the first group, after weights were loaded; a collective."""
        self.reset()
        self._begin_equal()

    def drop_pending(self) -> None:
        """Drop the exchange in flight."""
        pending, self._pending = self._pending, None
        if pending is not None and not zcomm.failure():
            with contextlib.suppress(zcomm.CollectiveFailed):
                pending.handle.wait()  # messages hold its memory

    def ledger(self) -> Mapping[str, int]:
        """Return the bytes of the outer state on this rank, by owner; of its largest message as well."""
        weights = sum(held.start.nbytes for held in self._fragments)
        largest = max((held.start.nbytes for held in self._fragments), default=0)
        is_on_host = any(storage.placement.tier is not Tier.DEVICE for storage in self.partition.storages)
        return dict(zip(owner_names(is_on_host), (weights, weights, largest)))


def _zero_shards(held: _Fragment) -> Iterator[LazyShard]:
    def content(part: slice) -> Callable[[], Tensor]:
        return lambda: held.start.new_zeros(part.stop - part.start)

    for segment in held.segments:
        piece = segment.piece
        yield from cut(LazyShard, piece.slot.name, piece.slot.address, piece.span, content)


def _shards(held: _Fragment, values: Tensor) -> Iterator[Shard]:
    for segment in held.segments:
        piece = segment.piece
        yield from cut(Shard, piece.slot.name, piece.slot.address, piece.span, values[segment.place].__getitem__)
