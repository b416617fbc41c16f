"""Quantized weights of split layers.

A quantized weight is no tensor: it has codes and scales, and a format that this package does not know.  Whoever holds
one cuts it through a Protocol.  Rows can be cut anywhere, since each row is quantized by itself; in the last dim,
cuts lie between groups of elements that share a scale.  So the part of a quantized weight has the codes and scales
that quantizing the part gives, and ranks may quantize their own parts.

Products with quantized weights round the activation.  A row-parallel layer splits each sum over the ranks, and its
result differs from the whole one's in the last bits; the next layer may round such an activation to another code, an
error of one part in 250.  `by_outputs` therefore turns row-parallel layers into layers of which each rank computes
some outputs from all inputs.  That costs two gathers instead of one all-reduce, of the same bytes where inputs and
outputs are equally wide, and gives the whole model's result bit for bit, if the operations in between do.  Torch's
do, but for elements that fill no vector register (an exp of 19 columns, heads of 6): columns are cut at multiples of
32 where these divide a layer.

Rejected: float64 partial sums (twice the bytes, slower kernels, and still not equal); cutting between groups only
(heads of 24 columns end inside a group of 32).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import attrs
from torch import Tensor, nn

from zpartition.layout.address import Address
from zpartition.tensor.plan import Rule, TensorPlan
from zpartition.tensor.styles import Row, RowSplit

__all__ = ["QuantizedWeight", "by_outputs", "cut_weight", "quantized_parts"]


_GRAIN = 32  # columns: two vector registers of 16 float32


class QuantizedWeight(Protocol):
    """A weight that is no tensor, and that can be cut."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the logical shape."""

    @property
    def unit(self) -> int:
        """Return the elements of the last dim that cannot be parted: cuts are at multiples, or at the end."""

    def narrow(self, dim: int, start: int, length: int) -> QuantizedWeight:
        """Return the part [start, start + length) of a dim; ValueError for a cut inside a group."""

    def join(self, others: Sequence[QuantizedWeight], dim: int = 0) -> QuantizedWeight:
        """Return this and `others`, one after the other along a dim, in new memory: the inverse of `narrow`."""

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors that it consists of."""


def cut_weight(weight: QuantizedWeight, address: Address) -> QuantizedWeight:
    """Return the part of a whole quantized weight at `address`, in new memory."""
    boxes = []
    for box in address.boxes:
        part = weight
        for dim, (lo, hi) in enumerate(box):
            if (lo, hi) != (0, part.shape[dim]):
                part = part.narrow(dim, lo, hi - lo)
        boxes.append(part)
    return boxes[0].join(boxes[1:])


def quantized_parts(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all quantized weights of a model: attributes `weight` that are no tensors."""
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if hasattr(weight, "narrow") and hasattr(weight, "parts"):
            yield from ((f"{name}.{key}", part) for key, part in weight.parts().items())


def by_outputs(plan: TensorPlan) -> TensorPlan:
    """Return the plan with all row-parallel layers split by outputs; see the module's docstring."""
    grain = math.lcm(plan.grain, _GRAIN)
    rules = [
        Rule(rule.pattern, attrs.evolve(rule.style, split=RowSplit.OUTPUTS)) if isinstance(rule.style, Row) else rule
        for rule in plan.rules
    ]
    return attrs.evolve(plan, rules=rules, grain=grain)
