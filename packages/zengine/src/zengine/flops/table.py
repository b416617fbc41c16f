"""Profile as text: totals, the most expensive classes at each depth, and a line per module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zengine.flops.profile import FlopsProfile, ModuleCost

__all__ = ["format_profile", "shown"]

_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_HEADER = ("module", "class", "params", "MACs", "FLOPs", "% FLOPs", "ms", "% time", "FLOPS")


def shown(value: float, unit: str = "") -> str:
    """1234567 -> "1.23 M", with a unit "1.23 MFLOPs"."""
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
    sections = [list(_summary(profile, step)), list(_dearest(profile, depth, top_modules))]
    if detailed:
        sections.append(_modules(profile, depth))
    return "\n\n".join("\n".join(section) for section in sections if section)


def _summary(profile: FlopsProfile, step: int) -> Iterator[str]:
    total = profile.total
    yield f"flops profile of {total.kind} after step {step}: matrix products, convolutions, attention"
    yield f"  parameters               {shown(total.params)}"
    yield f"  forward                  {shown(total.flops, 'FLOPs')} = {shown(total.macs, 'MACs')}"
    if total.ms > 0:
        rate = shown(total.flops_per_s, "FLOPS")
        yield f"  forward latency          {total.ms:.2f} ms, {rate} (counting slows it)"
    if profile.backward_flops:
        ratio = profile.backward_flops / total.flops if total.flops else 0.0
        yield f"  backward, counted        {shown(profile.backward_flops, 'FLOPs')}, {ratio:.2f} forwards"
    factor = f"{3 + profile.recompute_factor:g}"
    yield f"  a step by the formula    {shown(profile.formula_flops, 'FLOPs')} = {factor} forwards"
    for operation, flops in sorted(profile.operations.items(), key=lambda item: -item[1])[:5]:
        share = flops / total.flops if total.flops else 0.0
        yield f"  {share:<24.1%} of the forward's FLOPs in {operation}"


def _dearest(profile: FlopsProfile, depth: int, top: int) -> Iterator[str]:
    """Yield the classes with most FLOPs, parameters and time at each level."""
    if depth < 1 or top < 1:
        return
    yield f"the {'dearest class' if top == 1 else f'{top} dearest classes'} at each depth:"
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
    return f"{value:.2f}" if name == "ms" else shown(value)


def _modules(profile: FlopsProfile, depth: int) -> list[str]:
    """Format one line per module, indented by depth."""
    total = profile.total
    rows = [_HEADER, *(_row(cost, total) for cost in profile.modules if cost.depth <= depth)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    return [_aligned(row, widths).rstrip() for row in rows]


def _row(cost: ModuleCost, total: ModuleCost) -> tuple[str, ...]:
    name = cost.path.rpartition(".")[2] or "(model)"
    counts = (shown(cost.params), shown(cost.macs), shown(cost.flops), _percent(cost.flops, total.flops))
    time = (f"{cost.ms:.2f}" if cost.ms > 0 else "-", _percent(cost.ms, total.ms))
    rate = shown(cost.flops_per_s) if cost.flops_per_s else "-"
    return ("  " * cost.depth + name, cost.kind, *counts, *time, rate)


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    """Align the two names left and the numbers right."""
    cells = [cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
    return "  ".join(cells)
