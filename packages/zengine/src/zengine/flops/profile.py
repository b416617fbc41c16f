"""Profile of a forward pass: FLOPs, time and parameters by module, as a value and as text.

FLOPs follow the formulas of `torch.utils.flop_counter` on the actual shapes: matrix products, convolutions and
attention, two operations per multiply-add.  Pointwise work (activations, norms, softmax) is memory-bound and not
counted.  Causal attention counts as full, as in published model FLOPs.

Numbers are inclusive: a block includes its layers.  A module called twice counts twice; shared parameters count once,
in every module that reaches them.  The text has totals, the most expensive classes at each depth, and a line per
module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from zengine.telemetry.json_values import read_amount, read_count, read_text

__all__ = ["FlopsProfile", "ModuleCost", "format_amount", "format_profile"]

_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_HEADER = ("module", "class", "params", "MACs", "FLOPs", "% FLOPs", "ms", "% time", "FLOPS")


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


# -- text ----------------------------------------------------------------------------------------


def format_amount(value: float, unit: str = "") -> str:
    """Format 1234567 as "1.235 M", or with a unit as "1.235 MFLOPs"."""
    size, prefix = next(((size, prefix) for size, prefix in _UNITS if abs(value) >= size), (1.0, ""))
    digits = f"{value / size:.0f}" if size == 1.0 and value == int(value) else f"{value / size:.4g}"
    return f"{digits} {prefix}{unit}".rstrip()


def format_profile(
    profile: FlopsProfile, *, step: int, module_depth: int = -1, top_modules: int = 1, detailed: bool = True
) -> str:
    """Format a profile.

    step: optimizer steps before the profiled one; module_depth: deepest listed level, -1 for all; top_modules:
    classes listed per level; detailed: add a line per module.
    """
    deepest = max(cost.depth for cost in profile.modules)
    depth = deepest if module_depth < 0 else min(module_depth, deepest)
    sections = [list(_summary(profile, step)), list(_most_expensive(profile, depth, top_modules))]
    if detailed:
        sections.append(_modules(profile, depth))
    return "\n\n".join("\n".join(section) for section in sections if section)


def _summary(profile: FlopsProfile, step: int) -> Iterator[str]:
    total = profile.total
    yield f"flops profile of {total.kind} after step {step}: matrix products, convolutions, attention"
    yield f"  parameters               {format_amount(total.params)}"
    yield f"  forward                  {format_amount(total.flops, 'FLOPs')} = {format_amount(total.macs, 'MACs')}"
    if total.ms > 0:
        rate = format_amount(total.flops_per_s, "FLOPS")
        yield f"  forward latency          {total.ms:.2f} ms, {rate} (counting slows it)"
    if profile.backward_flops:
        ratio = profile.backward_flops / total.flops if total.flops else 0.0
        yield f"  backward, counted        {format_amount(profile.backward_flops, 'FLOPs')}, {ratio:.2f} forwards"
    factor = f"{3 + profile.recompute_factor:g}"
    yield f"  a step by the formula    {format_amount(profile.formula_flops, 'FLOPs')} = {factor} forwards"
    for operation, flops in sorted(profile.operations.items(), key=lambda item: -item[1])[:5]:
        share = flops / total.flops if total.flops else 0.0
        yield f"  {share:<24.1%} of the forward's FLOPs in {operation}"


def _most_expensive(profile: FlopsProfile, depth: int, top: int) -> Iterator[str]:
    """Yield the classes with most FLOPs, parameters and time at each level."""
    if depth < 1 or top < 1:
        return
    yield f"the {'' if top == 1 else f'{top} '}most expensive class{'' if top == 1 else 'es'} at each depth:"
    for level in range(1, depth + 1):
        ranked = []
        for name, pick in (("FLOPs", _flops), ("params", _params), ("ms", _ms)):
            by_kind: dict[str, float] = {}
            for cost in profile.modules:
                if cost.depth == level:
                    by_kind[cost.kind] = by_kind.get(cost.kind, 0.0) + pick(cost)
            best = sorted(((kind, value) for kind, value in by_kind.items() if value > 0), key=lambda item: -item[1])
            if best:
                values = ", ".join(f"{kind} {_amount(name, value)}" for kind, value in best[:top])
                ranked.append(f"{name}: {values}")
        yield f"  depth {level}   " + "   ".join(ranked)


def _flops(cost: ModuleCost) -> float:
    return cost.flops


def _params(cost: ModuleCost) -> float:
    return cost.params


def _ms(cost: ModuleCost) -> float:
    return cost.ms


def _amount(name: str, value: float) -> str:
    return f"{value:.2f}" if name == "ms" else format_amount(value)


def _modules(profile: FlopsProfile, depth: int) -> list[str]:
    """Format one line per module, indented by depth."""
    total = profile.total
    rows = [_HEADER, *(_row(cost, total) for cost in profile.modules if cost.depth <= depth)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    return [_aligned(row, widths).rstrip() for row in rows]


def _row(cost: ModuleCost, total: ModuleCost) -> tuple[str, ...]:
    name = cost.path.rpartition(".")[2] or "(model)"
    counts = (
        format_amount(cost.params),
        format_amount(cost.macs),
        format_amount(cost.flops),
        _percent(cost.flops, total.flops),
    )
    time = (f"{cost.ms:.2f}" if cost.ms > 0 else "-", _percent(cost.ms, total.ms))
    rate = format_amount(cost.flops_per_s) if cost.flops_per_s else "-"
    return ("  " * cost.depth + name, cost.kind, *counts, *time, rate)


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    """Align the two names left and the numbers right."""
    cells = [cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
    return "  ".join(cells)
