"""Stores: where the inputs of checkpointed blocks wait for their backward.

[Note: transfers]  On CUDA, neither the host nor the compute stream waits for a transfer to the host or back:

  - `put` copies the tensor on the device and sends that copy on the stream `down`.  So the tensor may be changed or
    freed at once.  At most `IN_FLIGHT` such copies exist: before one is dropped, the stream that made it waits for
    its transfer, so its memory is used again in the order of that stream.
  - `restore` takes the tensor from the stream `up`.  Blocks run backward in reverse order, so it also starts the
    transfer of the tensor that was put before this one.  One tensor at most is on the device ahead of its use.

Rejected: sending the tensor itself, which then must not change until the transfer is over, and is freed whenever the
allocator learns of that; waiting on the host for the oldest transfer, which would keep it from launching more work.
"""

from __future__ import annotations

import collections
import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol, final

import attrs
import torch
from torch import Tensor

from zpartition._compat import version

__all__ = ["ArenaStore", "DeviceStore", "HostStore", "Store"]

log = logging.getLogger("zpartition")

IN_FLIGHT = 4  # copies on the device that are on their way to the host

Restore = Callable[[], Tensor]  # returns the stored tensor on its device; may be called again


class Store(Protocol):
    """Keeps tensors until backward."""

    def put(self, flat: Tensor) -> Restore:
        """Keep `flat` (1-D, contiguous, without a graph) until the returned function is dropped."""


@final
@attrs.frozen
class DeviceStore:
    """Identity: the tensor itself."""

    def put(self, flat: Tensor) -> Restore:
        return _restore_same(flat)


@final
@attrs.define(eq=False)
class HostStore:
    """Host memory, page-locked if CUDA is available; see [Note: transfers]."""

    transfers: Transfers = attrs.field(factory=lambda: Transfers(), repr=False)

    def put(self, flat: Tensor) -> Restore:
        if flat.device.type == "cpu":
            return _restore_same(flat)
        return self.transfers.send(flat, _on_host(flat.numel(), flat.dtype)).restore


@final
@attrs.define(eq=False)
class ArenaStore:
    """One preallocated buffer for a number of tensors of one size, allocated on first use.

    It avoids fragmentation of device memory by many tensors of different sizes.

    Invariant: a slot is in `free`, or held by the result of one `put`.
    """

    num_slots: int  # of each size and dtype; further tensors are kept outside, with one warning
    on_host: bool = False
    free: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = attrs.field(factory=dict)
    reported_sizes: set[int] = attrs.field(factory=set)  # sizes that did not fit
    transfers: Transfers = attrs.field(factory=lambda: Transfers(), repr=False)

    def put(self, flat: Tensor) -> Restore:
        """Copy `flat` to a free slot."""
        key = flat.numel(), flat.dtype, flat.device
        if key not in self.free:
            self.free[key] = list(self._allocate(flat).view(self.num_slots, -1).unbind())
        slots = self.free[key]
        if not slots:
            self._warn_once(flat.numel())
            return (HostStore(self.transfers) if self.on_host else DeviceStore()).put(flat)
        place = slots.pop()
        if place.device != flat.device:
            restore = self.transfers.send(flat, place).restore
        else:
            restore = _copying(place.copy_(flat))
        return _ArenaSlot(slots, place, restore).restore

    def _allocate(self, flat: Tensor) -> Tensor:
        numel = self.num_slots * flat.numel()
        if self.on_host and flat.device.type != "cpu":
            return _on_host(numel, flat.dtype)
        return torch.empty(numel, dtype=flat.dtype, device=flat.device)

    def _warn_once(self, numel: int) -> None:
        if numel not in self.reported_sizes:
            self.reported_sizes.add(numel)
            log.warning(
                "more than %d activations of %d elements are saved at once; the others are kept outside the arena. "
                "Set the number of checkpoints to that of blocks (times micro-batches in flight).",
                self.num_slots,
                numel,
            )


@final
@attrs.define(eq=False)
class _ArenaSlot:
    """A slot of an arena, held until the last reference is dropped."""

    free_slots: list[Tensor]
    place: Tensor
    copy: Restore  # callers may use the tensor longer than this slot is held

    def restore(self) -> Tensor:
        return self.copy()

    def __del__(self) -> None:
        self.free_slots.append(self.place)


def _copying(place: Tensor) -> Restore:
    return lambda: place.clone()


@final
@attrs.define(eq=False)
class Transfers:
    """Transfers of one store between a CUDA device and pinned memory; see [Note: transfers].

    The streams are made with the first transfer.
    """

    down: Any = None  # torch.cuda.Stream, to the host
    up: Any = None  # torch.cuda.Stream, to the device
    leaving: collections.deque[tuple[Tensor, Any, Any]] = attrs.field(
        factory=collections.deque
    )  # copies on the device, each with the stream that made it and the event behind its transfer
    latest: Callable[[], _Sent | None] = lambda: None  # weak reference to the last one sent

    def send(self, flat: Tensor, place: Tensor) -> _Sent:
        """Start to copy `flat`, (n,) on the device, to `place`, (n,) pinned, which another tensor may have had."""
        device = flat.device
        if self.down is None:
            self.down, self.up = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(device)
        self._drop(IN_FLIGHT - 1)
        copied = flat.clone()
        self.down.wait_stream(current)
        self.down.wait_stream(self.up)  # which may still read `place`
        with torch.cuda.stream(self.down):
            place.copy_(copied, non_blocking=True)
            arrived = self.down.record_event()
        self.leaving.append((copied, current, arrived))
        sent = _Sent(self, place, device, arrived, self.latest)
        self.latest = weakref.ref(sent)
        return sent

    def fetch(self, sent: _Sent) -> tuple[Tensor, Any]:
        """Start to copy a tensor back to the device; return it and the event behind its transfer."""
        self._drop(0)
        tensor = torch.empty_like(sent.place, device=sent.device)
        self.up.wait_stream(torch.cuda.current_stream(sent.device))  # whose memory the tensor may be
        self.up.wait_event(sent.arrived)
        with torch.cuda.stream(self.up):
            tensor.copy_(sent.place, non_blocking=True)
            tensor.record_stream(self.up)  # a tensor that is fetched ahead may be dropped unused
            return tensor, self.up.record_event()

    def _drop(self, num_left: int) -> None:
        while len(self.leaving) > num_left:
            _, stream, arrived = self.leaving.popleft()
            stream.wait_event(arrived)


@final
@attrs.define(eq=False)
class _Sent:
    """One tensor in pinned memory, or on its way."""

    transfers: Transfers
    place: Tensor
    device: torch.device
    arrived: Any  # torch.cuda.Event behind the transfer to the host
    earlier: Callable[[], _Sent | None]  # weak reference to the tensor that was sent before
    ahead: tuple[Tensor, Any] | None = None  # on the device again, with the event behind its transfer

    def restore(self) -> Tensor:
        """Return the tensor on its device, ordered on the current stream; start to fetch the one that is next."""
        (tensor, back), self.ahead = self.ahead or self.transfers.fetch(self), None
        following = self.earlier()
        if following is not None and following.ahead is None:
            following.ahead = self.transfers.fetch(following)
        current = torch.cuda.current_stream(self.device)
        current.wait_event(back)
        tensor.record_stream(current)  # another one than the stream that asked for it ahead
        return tensor


def _restore_same(flat: Tensor) -> Restore:
    """Return the tensor without a copy, so it must not change; autograd checks only what it saved itself."""
    before = version(flat)

    def restore() -> Tensor:
        if version(flat) != before:
            raise RuntimeError(
                f"an input of a checkpointed block ({flat.numel()} elements) was modified in place, so the block "
                "would be recomputed from other values: write x = x + block(x) instead of x += block(x)."
            )
        return flat

    return restore


def _on_host(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(numel, dtype=dtype, pin_memory=torch.cuda.is_available())
