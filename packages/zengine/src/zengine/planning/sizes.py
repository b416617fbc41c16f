"""Memory and traffic of a rank for a model under a plan, computed by zpartition."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import nn
from torch.nn import Parameter

import zoptim
import zpartition
from zengine.config import Plan
from zengine.config.plan.precision import default_master_dtype

__all__ = ["Sizes", "at_stage", "optimizer_maker", "sends_once", "sizes"]

_USUAL = "AdamW"  # for a config whose optimizer the caller brings


@attrs.frozen(kw_only=True)
class Sizes:
    """Memory and traffic of one rank, between and during steps, without activations."""

    memory: zpartition.MemoryPlan
    traffic: zpartition.TrafficPlan


def sizes(module: nn.Module, plan: Plan, *, world_size: int, device: str) -> Sizes:
    """Return the sizes of `module` (in the plan's dtype, on any device, also meta) under `plan`."""
    make, zero = optimizer_maker(module, plan), plan.zero
    if sends_once(plan):
        zero = attrs.evolve(zero, reduce_at=zpartition.ReduceAt.BATCH)
    memory = zpartition.plan(
        module,
        policy=zero,
        world_size=world_size,
        optimizer=make,
        num_backwards=plan.batch.accumulation,
        device=device,
    )
    traffic = zpartition.plan_traffic(
        module,
        policy=zero,
        world_size=world_size,
        optimizer=make,
        num_backwards=plan.batch.accumulation,
    )
    return Sizes(memory=memory, traffic=traffic)


def sends_once(plan: Plan) -> bool:
    """Return True for a pipeline, which reduces gradients once per batch regardless of `reduce_at`."""
    return plan.parallel.degrees.pipeline > 1


def at_stage(plan: Plan, stage: int) -> Plan:
    """Return the plan at another stage, without settings that the stage ignores."""
    zero = plan.zero
    if stage == 0:
        zero = attrs.evolve(zero, shard_group_size=0, gradient_bits=0, gradient_hop_size=0)
    if stage < 3:
        nothing = attrs.evolve(zero.offload, weights=zpartition.Tier.DEVICE)
        zero = attrs.evolve(zero, weight_bits=0, frozen_weight_bits=0, secondary_group_size=0, offload=nothing)
    if stage >= 2:
        zero = attrs.evolve(zero, reduce_at=zpartition.ReduceAt.MICRO_STEP)
    if plan.precision.param is None:
        zero = attrs.evolve(zero, master_dtype=default_master_dtype(stage))
    return attrs.evolve(plan, zero=attrs.evolve(zero, stage=stage))


def optimizer_maker(module: nn.Module, plan: Plan) -> Callable[[list[Parameter]], torch.optim.Optimizer]:
    """Return the config's optimizer, or the default one, over parameters identified by name where they have one."""
    names = {id(param): name for name, param in module.named_parameters()}
    kind = plan.optimizer.type or _USUAL
    options = dict(plan.optimizer.params) if plan.optimizer.type else {}

    def make(params: list[Parameter]) -> torch.optim.Optimizer:
        known = all(id(param) in names for param in params)
        given = [(names[id(param)], param) for param in params] if known else params
        return zoptim.make_optimizer(kind, given, options)

    return make
