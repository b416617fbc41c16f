"""Stores: where the inputs of checkpointed blocks wait for their backward."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, final

import attrs
import torch
from torch import Tensor

from zpartition._compat import version

__all__ = ["ArenaStore", "DeviceStore", "HostStore", "Store"]

log = logging.getLogger("zpartition")

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
@attrs.frozen
class HostStore:
    """Host memory, page-locked if CUDA is available."""

    def put(self, flat: Tensor) -> Restore:
        if flat.device.type == "cpu":
            return _restore_same(flat)
        place, device = _on_host(flat.numel(), flat.dtype), flat.device
        place.copy_(flat)
        return lambda: place.to(device, non_blocking=True)


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

    def put(self, flat: Tensor) -> Restore:
        """Copy `flat` to a free slot."""
        key = flat.numel(), flat.dtype, flat.device
        if key not in self.free:
            self.free[key] = list(self._allocate(flat).view(self.num_slots, -1).unbind())
        slots = self.free[key]
        if not slots:
            self._warn_once(flat.numel())
            return (HostStore() if self.on_host else DeviceStore()).put(flat)
        place = slots.pop()
        place.copy_(flat)
        return _ArenaSlot(slots, place, flat.device).restore

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
    device: torch.device

    def restore(self) -> Tensor:
        """Copy the tensor back to its device: callers may use it longer than this slot is held."""
        return self.place.to(self.device, non_blocking=True, copy=True)

    def __del__(self) -> None:
        self.free_slots.append(self.place)


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
