"""LAMB on cut tensors: the two halves of a step, and their implementation in torch for any device and format.

The first half updates the moments and sums squares; the second updates the weights by squares that have been reduced
over ranks.  `CpuJob` and `GpuJob` have the same methods.
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
from zoptim.updates.fallback import count_update, next_step, unscale_gradient
from zoptim.updates.plan import Entry

__all__ = ["LambJob", "TorchLambJob"]


class LambJob(Protocol):
    """A job of LAMB in two halves."""

    def sums(self, hyper: Hyper, signals: Signals) -> Tensor | None:
        """Update moments; return (rows, 2) float64 squares of weights and directions, which `apply` reads."""

    def apply(self) -> None:
        """Update weights, by squares that are now those of whole tensors."""


@final
@attrs.define(eq=False)
class TorchLambJob:
    """One step of a batch in torch."""

    group: Mapping[str, Any]
    spec: StateSpec
    entries: Sequence[Entry]
    directions: list[Tensor] = attrs.field(factory=list)  # of each entry; set by `sums`, read by `apply`
    squares: Tensor = attrs.field(factory=lambda: torch.zeros(0, 2, dtype=torch.float64))  # (rows, 2)

    def sums(self, hyper: Hyper, signals: Signals) -> Tensor:
        """See LambJob; the options are the group's."""
        found = []
        for entry in self.entries:
            weight = self.spec.read_weight(entry.param, entry.state)
            grad = unscale_gradient(entry, weight.dtype, signals)
            kept = {name: self.spec.read(entry.state, name) for name in self.spec.names}
            moments = AdamMoments(step=next_step(entry) - 1, **kept)
            direction, after = lamb_direction(weight, grad, moments, self.group)
            found.append(torch.stack([weight.double().square().sum(), direction.double().square().sum()]))
            self.directions.append(direction)
            for stream, name in enumerate(kept, start=1):
                self.spec.write(entry.state, name, getattr(after, name), seed_of(next_step(entry), stream))
        self.squares = torch.stack(found)
        return self.squares

    def apply(self) -> None:
        """See LambJob."""
        bounds = self.group["min_coeff"], self.group["max_coeff"]
        for entry, direction, (weight_square, direction_square) in zip(
            self.entries, self.directions, self.squares.tolist()
        ):
            ratio = trust_ratio(math.sqrt(weight_square), math.sqrt(direction_square), *bounds)
            weight = self.spec.read_weight(entry.param, entry.state) - float(self.group["lr"]) * ratio * direction
            self.spec.write_weight(entry.param, entry.state, weight, seed_of(next_step(entry), 0))
            if entry.copy is not None:
                entry.copy.detach().copy_(weight)
        count_update(self.entries)
