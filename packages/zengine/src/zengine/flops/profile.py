"""Profile of a forward pass as a value: FLOPs, time and parameters by module.

FLOPs follow the formulas of `torch.utils.flop_counter` on the actual shapes: matrix products, convolutions and
attention, two operations per multiply-add.  Pointwise work (activations, norms, softmax) is memory-bound and not
counted.  Causal attention counts as full, as in published model FLOPs.

Numbers are inclusive: a block includes its layers.  A module called twice counts twice; shared parameters count once,
in every module that reaches them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from zengine.telemetry.json_values import read_amount, read_count, read_text

__all__ = ["FlopsProfile", "ModuleCost"]


@attrs.frozen(kw_only=True)
class ModuleCost:
    """Cost of one module, its children included."""

    path: str  # in the model, "" for the model itself
    kind: str  # name of its class
    params: int  # elements of its parameters, each once, whole even where this rank holds a part
    flops: int = 0  # of the forward
    ms: float = 0.0  # of the forward; 0 where nothing was run
    calls: int = 0

    @property
    def depth(self) -> int:
        """Depth in the model: 0 for the model, 1 for its children."""
        return self.path.count(".") + 1 if self.path else 0

    @property
    def macs(self) -> int:
        """Multiply-adds."""
        return self.flops // 2

    @property
    def flops_per_s(self) -> float:
        """Achieved FLOPS; 0 if no time is known."""
        return self.flops / self.ms * 1e3 if self.ms > 0 else 0.0


@attrs.frozen(kw_only=True)
class FlopsProfile:
    """One forward pass (or the sum of several) and the FLOPs of its backward."""

    modules: tuple[ModuleCost, ...]  # the model first, then depth first, in the order of definition
    operations: Mapping[str, int] = attrs.field(factory=dict)  # forward FLOPs by operation
    backward_flops: int = 0  # counted, recomputed activations included; 0 where no backward was seen
    recompute_factor: float = 0.0  # extra forwards in a backward, as the config says

    @property
    def total(self) -> ModuleCost:
        """Cost of the whole model."""
        return self.modules[0]

    @property
    def formula_flops(self) -> float:
        """FLOPs of a training step by rule of thumb: backward is two forwards plus recomputation."""
        return self.total.flops * (3 + self.recompute_factor)

    def as_json(self) -> dict[str, Any]:
        """Return the content of flops.json."""
        return attrs.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> FlopsProfile:
        """Inverse of `as_json`; ignores further keys.  Raises KeyError, TypeError or ValueError for invalid input."""
        modules = tuple(map(_module, fields["modules"]))
        if not modules:
            raise ValueError("there are no modules")
        return cls(
            modules=modules,
            operations={read_text(name): read_count(flops) for name, flops in dict(fields["operations"]).items()},
            backward_flops=read_count(fields["backward_flops"]),
            recompute_factor=read_amount(fields["recompute_factor"]),
        )


def _module(row: Mapping[str, Any]) -> ModuleCost:
    return ModuleCost(
        path=read_text(row["path"]),
        kind=read_text(row["kind"]),
        params=read_count(row["params"]),
        flops=read_count(row["flops"]),
        ms=read_amount(row["ms"]),
        calls=read_count(row["calls"]),
    )
