"""LAMB in two halves without a kernel: for cut tensors on any device and in any format.

What the kernels' jobs do (`CpuJob.sums` and `apply`), said in torch: moments and squares first, then, with squares
that other ranks have added to, the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final

import attrs
import torch
from torch import Tensor

from zoptim.backends.contract import Hyper
from zoptim.backends.signals import Signals
from zoptim.rules.elementwise import AdamMoments, lamb_direction, trust_ratio
from zoptim.states.formats import seed_of
from zoptim.states.spec import StateSpec
from zoptim.updates.fallback import count_update, divided_gradient, next_step
from zoptim.updates.plan import Entry

__all__ = ["HasHalves", "LambInTorch"]


class HasHalves(Protocol):
    """A job of LAMB."""

    def sums(self, hyper: Hyper, signals: Signals) -> Tensor | None:
        """Moments move; (rows, 2) float64 squares of weights and directions, which `apply` reads."""

    def apply(self) -> None:
        """Weights move, by squares that are now those of whole tensors."""


@final
@attrs.define(eq=False)
class LambInTorch:
    """One step of a batch."""

    group: Mapping[str, Any]
    memory: StateSpec
    entries: Sequence[Entry]
    directions: list[Tensor] = attrs.field(factory=list)  # of each entry, between the halves
    squares: Tensor = attrs.field(factory=lambda: torch.zeros(0, 2, dtype=torch.float64))  # (rows, 2)

    def sums(self, hyper: Hyper, signals: Signals) -> Tensor:
        """See HasHalves; the options are the group's."""
        found = []
        for entry in self.entries:
            weight = self.memory.read_weight(entry.param, entry.state)
            grad = divided_gradient(entry, weight.dtype, signals)
            kept = {name: self.memory.read(entry.state, name) for name in self.memory.names}
            moments = AdamMoments(step=next_step(entry) - 1, **kept)
            direction, after = lamb_direction(weight, grad, moments, self.group)
            found.append(torch.stack([weight.double().square().sum(), direction.double().square().sum()]))
            self.directions.append(direction)
            for stream, name in enumerate(kept, start=1):
                self.memory.write(entry.state, name, getattr(after, name), seed_of(next_step(entry), stream))
        self.squares = torch.stack(found)
        return self.squares

    def apply(self) -> None:
        """See HasHalves."""
        bounds = self.group["min_coeff"], self.group["max_coeff"]
        for entry, direction, (weight_square, direction_square) in zip(
            self.entries, self.directions, self.squares.tolist()
        ):
            ratio = trust_ratio(math.sqrt(weight_square), math.sqrt(direction_square), *bounds)
            weight = self.memory.read_weight(entry.param, entry.state) - float(self.group["lr"]) * ratio * direction
            self.memory.write_weight(entry.param, entry.state, weight, seed_of(next_step(entry), 0))
            if entry.copy is not None:
                entry.copy.detach().copy_(weight)
        count_update(self.entries)
