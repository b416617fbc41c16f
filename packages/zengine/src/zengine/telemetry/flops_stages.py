"""The profiles of a pipeline's stages as one of the whole model, and what each stage has of it.

Names over the stages are those of the model, so their rows are put one after the other; what several stages have
parts of (the model, containers that are never called) is added up.  Time is that of one micro-batch through all
stages, as if they worked one after the other: which they do, for one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from zengine.telemetry.flops import FlopsProfile, ModuleCost
from zengine.telemetry.flops_table import shown

__all__ = ["averaged", "joined", "stage_lines"]


def averaged(profile: FlopsProfile, count: int) -> FlopsProfile:
    """One of `count` micro-batches that were counted together."""

    def part(cost: ModuleCost) -> ModuleCost:
        return attrs.evolve(cost, flops=cost.flops // count, ms=cost.ms / count, calls=cost.calls // count)

    return attrs.evolve(
        profile,
        modules=tuple(map(part, profile.modules)),
        operations={name: flops // count for name, flops in profile.operations.items()},
        backward_flops=profile.backward_flops // count,
    )


def joined(profiles: Sequence[FlopsProfile]) -> FlopsProfile:
    """The profile of the model whose stages these are."""
    costs: dict[str, ModuleCost] = {}
    operations: dict[str, int] = {}
    for profile in profiles:
        for cost in profile.modules:
            costs[cost.path] = _added(costs[cost.path], cost) if cost.path in costs else cost
        for name, flops in profile.operations.items():
            operations[name] = operations.get(name, 0) + flops
    return FlopsProfile(
        modules=tuple(costs.values()),
        operations=operations,
        backward_flops=sum(profile.backward_flops for profile in profiles),
        recompute_factor=profiles[0].recompute_factor,
    )


def _added(one: ModuleCost, other: ModuleCost) -> ModuleCost:
    return attrs.evolve(
        one,
        params=one.params + other.params,
        flops=one.flops + other.flops,
        ms=one.ms + other.ms,
        calls=max(one.calls, other.calls),
    )


def stage_lines(profiles: Sequence[FlopsProfile]) -> str:
    """A line for each rank of the pipeline: what decides how long the others wait."""
    forwards = [profile.total.flops for profile in profiles]
    mean = sum(forwards) / len(forwards) or 1.0
    lines = ["a micro-batch at each rank of the pipeline, forward and backward:"]
    for rank, profile in enumerate(profiles):
        total = profile.total
        counts = f"{shown(total.flops, 'FLOPs')} + {shown(profile.backward_flops, 'FLOPs')}"
        lines.append(
            f"  {rank}   {shown(total.params)} parameters   {counts}   {total.ms:.2f} ms forward   "
            f"{total.flops / mean:.2f} of the mean"
        )
    return "\n".join(lines)
