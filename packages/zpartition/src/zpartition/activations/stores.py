"""Where the inputs of checkpointed blocks wait for their backward."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, final

import attrs
import torch
from torch import Tensor

from zpartition._compat import version

__all__ = ["Arena", "AsTheyAre", "OnHost", "Store"]

log = logging.getLogger("zpartition")

Back = Callable[[], Tensor]  # gives back what was put, on its device; may be called again


class Store(Protocol):
    """Keeps tensors for a while."""

    def put(self, flat: Tensor) -> Back:
        """Keep `flat` (1-D, contiguous, without a graph) until what is returned is dropped."""


@final
@attrs.frozen
class AsTheyAre:
    """The identity: the tensor itself."""

    def put(self, flat: Tensor) -> Back:
        return _itself(flat)


@final
@attrs.frozen
class OnHost:
    """In memory of the host, page-locked where there is an accelerator that copies from it."""

    def put(self, flat: Tensor) -> Back:
        if flat.device.type == "cpu":
            return _itself(flat)
        place, device = _on_host(flat.numel(), flat.dtype), flat.device
        place.copy_(flat)
        return lambda: place.to(device, non_blocking=True)


@final
@attrs.define(eq=False)
class Arena:
    """One piece of memory for so many tensors of one size, made at the first: many sizes that come and go in turn
    would leave holes in the device's memory.

    Invariant: a slot is in `free`, or held by what one `put` has returned.
    """

    num_slots: int  # of each size and dtype; what exceeds them is kept as it is, and told once
    on_host: bool = False
    free: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = attrs.field(factory=dict)
    told: set[int] = attrs.field(factory=set)  # sizes that did not fit

    def put(self, flat: Tensor) -> Back:
        """Copy `flat` to a free slot."""
        key = flat.numel(), flat.dtype, flat.device
        if key not in self.free:
            self.free[key] = list(self._whole(flat).view(self.num_slots, -1).unbind())
        slots = self.free[key]
        if not slots:
            self._tell(flat.numel())
            return (OnHost() if self.on_host else AsTheyAre()).put(flat)
        place = slots.pop()
        place.copy_(flat)
        return _Slot(slots, place, flat.device).back

    def _whole(self, flat: Tensor) -> Tensor:
        numel = self.num_slots * flat.numel()
        if self.on_host and flat.device.type != "cpu":
            return _on_host(numel, flat.dtype)
        return torch.empty(numel, dtype=flat.dtype, device=flat.device)

    def _tell(self, numel: int) -> None:
        if numel not in self.told:
            self.told.add(numel)
            log.warning(
                "more than %d activations of %d elements wait at once: the others are kept apart. Set the number of "
                "checkpoints to how many blocks a forward passes (times the micro-batches in flight).",
                self.num_slots,
                numel,
            )


@final
@attrs.define(eq=False)
class _Slot:
    """A part of an arena, until the last reference goes."""

    home: list[Tensor]
    place: Tensor
    device: torch.device

    def back(self) -> Tensor:
        """A copy of what was put, where it came from: others may use it longer than this slot is held."""
        return self.place.to(self.device, non_blocking=True, copy=True)

    def __del__(self) -> None:
        self.home.append(self.place)


def _itself(flat: Tensor) -> Back:
    """No copy, so it must not change; autograd looks after that for what it keeps itself alone."""
    before = version(flat)

    def back() -> Tensor:
        if version(flat) != before:
            raise RuntimeError(
                f"an activation of {flat.numel()} elements that a checkpointed block began with was modified in "
                "place, and the block would run again with other inputs: write x = x + block(x) for x += block(x)."
            )
        return flat

    return back


def _on_host(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(numel, dtype=dtype, pin_memory=torch.cuda.is_available())
