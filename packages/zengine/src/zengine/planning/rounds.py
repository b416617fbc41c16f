"""Rounds of local steps (diloco) in the sizes of a plan."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import nn
from torch.nn import Parameter

import zpartition
from zengine.config import Plan
from zengine.config.keys.features import DiLoCo
from zpartition.rounds import RoundPolicy, RoundsPlan, plan_rounds

__all__ = ["round_policy", "rounds_of", "with_rounds"]


def round_policy(section: DiLoCo) -> RoundPolicy:
    """Return the policy of the section."""
    return RoundPolicy(
        start=section.start_step,
        sync_every=section.sync_every,
        num_fragments=section.fragments,
        lr=section.outer.lr,
        momentum=section.outer.momentum,
        nesterov=section.outer.nesterov,
        delay=section.sync_delay,
        merge_alpha=section.merge_alpha,
        bits=section.quantize_bits,
    )


def rounds_of(
    module: nn.Module,
    plan: Plan,
    *,
    world_size: int,
    optimizer: Callable[[list[Parameter]], torch.optim.Optimizer] | None,
) -> RoundsPlan | None:
    """Return memory and traffic of the rounds of groups of `world_size` ranks; None without the section."""
    if not plan.diloco.sync_every:
        return None
    return plan_rounds(
        module,
        round_policy(plan.diloco),
        num_groups=max(plan.parallel.degrees.replicate, 1),
        policy=plan.zero,
        world_size=world_size,
        optimizer=optimizer,
    )


def with_rounds(
    memory: zpartition.MemoryPlan, traffic: zpartition.TrafficPlan, rounds: RoundsPlan
) -> tuple[zpartition.MemoryPlan, zpartition.TrafficPlan]:
    """Return memory and traffic with those of rounds."""
    return (
        attrs.evolve(memory, outer=rounds.device, elsewhere={**memory.elsewhere, **rounds.elsewhere}),
        attrs.evolve(traffic, flows=(*traffic.flows, *rounds.flows), unit_bytes=rounds.plain_bytes),
    )
