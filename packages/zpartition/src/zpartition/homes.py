"""Where the master and the optimizer's states of one bucket live between steps.

A storage asks its home to take the weights over into the master (`refresh`) and the master into the weights
(`publish`); a `Holder` asks it for the optimizer's state.  The identity is `IN_PLACE`: everything is on the device,
as plain tensors, and the master may be the weights themselves.  On disk (disk_states.py) nothing is there between
steps, and reading makes a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, final

import attrs
import torch
from torch import Tensor
from torch.nn import Parameter

from zpartition.mover import Mover
from zpartition.offload import Tier
from zpartition.state import InOptimizer, StateHome

__all__ = ["IN_PLACE", "Home", "InPlace", "OnHost"]


class Home(StateHome, Protocol):
    """The place of one bucket's master and states."""

    @property
    def tier(self) -> Tier: ...

    def adopt(self, master: Parameter) -> None:
        """Move the memory of a fresh master here; its contents do not count before `refresh`."""

    def refresh(self, master: Parameter, weights: Tensor) -> None:
        """master = weights, (span numel,) of the parameters' dtype."""

    def publish(self, master: Parameter, weights: Tensor) -> None:
        """Start weights = master, cast."""

    def values(self, master: Parameter) -> Tensor:
        """(span numel,) the master, to be read: live memory where it is in memory."""

    def write(self, master: Parameter, start: int, part: Tensor) -> None:
        """master[start:...] = part."""


def same_bits(first: Tensor, second: Tensor) -> Tensor:
    """Element by element, NaN like any other number; both of one dtype."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    return first.view(kind) == second.view(kind)


def take_edits(home: Home, master: Parameter, weights: Tensor, unchanged: Tensor) -> None:
    """master = weights, (span numel,), but for what is `unchanged`: that keeps the digits that weights lack."""
    values = home.values(master)
    home.refresh(master, torch.where(unchanged.to(values.device), values, weights.to(values)))


class InPlace(InOptimizer):
    """On the device; the base of everything that is in memory."""

    tier = Tier.DEVICE

    def adopt(self, master: Parameter) -> None:
        """It is there."""

    def refresh(self, master: Parameter, weights: Tensor) -> None:
        if master.data_ptr() != weights.data_ptr():
            master.data.copy_(weights)

    def publish(self, master: Parameter, weights: Tensor) -> None:
        if master.data_ptr() != weights.data_ptr():
            weights.copy_(master.data)

    def values(self, master: Parameter) -> Tensor:
        return master.data

    def write(self, master: Parameter, start: int, part: Tensor) -> None:
        master.data[start : start + part.numel()].copy_(part)


IN_PLACE: Home = InPlace()


@final
@attrs.define(eq=False)
class OnHost(InPlace):
    """In CPU memory of its own; torch keeps an optimizer's states beside the master."""

    mover: Mover
    ahead: Callable[[], None] = lambda: None  # takes back what was stepped ahead of the verdict (ahead.py)
    tier = Tier.HOST

    def adopt(self, master: Parameter) -> None:
        master.data = self.mover.empty(master.numel(), master.dtype)

    def refresh(self, master: Parameter, weights: Tensor) -> None:
        self.ahead()
        master.data.copy_(weights)

    def publish(self, master: Parameter, weights: Tensor) -> None:
        self.ahead()
        self.mover.send(weights, master.data)

    def values(self, master: Parameter) -> Tensor:
        self.ahead()
        return master.data

    def write(self, master: Parameter, start: int, part: Tensor) -> None:
        self.ahead()
        super().write(master, start, part)
