"""Join of the pipeline stages' profiles into the model's profile, and the share of each stage.

Names are those of the whole model, so rows of the stages are concatenated; costs of modules that several stages have
parts of (the model, containers that are never called) add up.  Time is that of one micro-batch through all stages in
sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from zengine.flops.profile import FlopsProfile, ModuleCost
from zengine.flops.table import shown

__all__ = ["averaged", "joined", "stage_lines"]


def averaged(profile: FlopsProfile, count: int) -> FlopsProfile:
    """Return the profile of one of `count` micro-batches that were counted together."""

    def part(cost: ModuleCost) -> ModuleCost:
        return attrs.evolve(cost, flops=cost.flops // count, ms=cost.ms / count, calls=cost.calls // count)

    return attrs.evolve(
        profile,
        modules=tuple(map(part, profile.modules)),
        operations={name: flops // count for name, flops in profile.operations.items()},
        backward_flops=profile.backward_flops // count,
    )


def joined(profiles: Sequence[FlopsProfile]) -> FlopsProfile:
    """Return the profile of the model from those of its stages."""
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
    """Format a line per pipeline rank; the slowest decides how long the others wait."""
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
