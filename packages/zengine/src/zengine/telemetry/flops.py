"""What a forward pass costs, module by module: operations, time, parameters; as values.

FLOPs are counted by the formulas of `torch.utils.flop_counter`, from the shapes that the operations really had:
matrix products, convolutions and attention, two operations for a multiply-add.  Pointwise work (activations, norms,
softmax) is bound by memory and not counted.  Causal attention counts as full, as in published model FLOPs.

Numbers are inclusive: a block holds what its layers hold.  A module that is called twice counts twice; parameters
that are shared count once, in every module that reaches them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from zengine.telemetry.fields import amount, text, whole

__all__ = ["FlopsProfile", "ModuleCost"]


@attrs.frozen(kw_only=True)
class ModuleCost:
    """One module in one profile, its children included."""

    path: str  # in the model, "" for the model itself
    kind: str  # name of its class
    params: int  # elements of its parameters, each once, whole even where this rank holds a part
    flops: int = 0  # of the forward
    ms: float = 0.0  # of the forward; 0 where nothing was run
    calls: int = 0

    @property
    def depth(self) -> int:
        """0 for the model, 1 for its children."""
        return self.path.count(".") + 1 if self.path else 0

    @property
    def macs(self) -> int:
        """Multiply-adds."""
        return self.flops // 2

    @property
    def flops_per_s(self) -> float:
        """Achieved rate; 0 where no time is known."""
        return self.flops / self.ms * 1e3 if self.ms > 0 else 0.0


@attrs.frozen(kw_only=True)
class FlopsProfile:
    """One forward pass (or several, added up), and what its backward computed."""

    modules: tuple[ModuleCost, ...]  # the model first, then depth first, in the order of definition
    operations: Mapping[str, int] = attrs.field(factory=dict)  # forward FLOPs by operation
    backward_flops: int = 0  # counted, recomputed activations included; 0 where no backward was seen
    recompute_factor: float = 0.0  # extra forwards in a backward, as the config says

    @property
    def total(self) -> ModuleCost:
        """The whole model."""
        return self.modules[0]

    @property
    def formula_flops(self) -> float:
        """A training step by the rule of thumb: backward is two forwards, and what is recomputed."""
        return self.total.flops * (3 + self.recompute_factor)

    def as_json(self) -> dict[str, Any]:
        """For flops.json."""
        return attrs.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> FlopsProfile:
        """What `as_json` gave; further keys are left alone. Raises KeyError, TypeError or ValueError for others."""
        modules = tuple(map(_module, fields["modules"]))
        if not modules:
            raise ValueError("there are no modules")
        return cls(
            modules=modules,
            operations={text(name): whole(flops) for name, flops in dict(fields["operations"]).items()},
            backward_flops=whole(fields["backward_flops"]),
            recompute_factor=amount(fields["recompute_factor"]),
        )


def _module(row: Mapping[str, Any]) -> ModuleCost:
    return ModuleCost(
        path=text(row["path"]),
        kind=text(row["kind"]),
        params=whole(row["params"]),
        flops=whole(row["flops"]),
        ms=amount(row["ms"]),
        calls=whole(row["calls"]),
    )
