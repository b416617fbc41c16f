"""Shares the experts of the module out, where the config or its own MoE layers ask for it and nobody has done it.

The experts of a layer go to runs of the ranks that sum gradients, so they cost no rank of their own.  Layers of
`zpartition.experts.MoE` are found, and blocks of Transformers, whose experts are stacked in parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

import zcomm
import zpartition
from zengine.build.agreement import compare, parameter_lines, plan_lines
from zengine.engine.stages import stage_axes
from zengine.imports import is_imported

if TYPE_CHECKING:
    from zengine.config import Plan

__all__ = ["deal_experts", "expert_axes", "refuse_experts"]


def expert_axes(module: nn.Module) -> Mapping[str, int]:
    """The expert ranks that the module's layers have, or ask for (`ep_size`).  A collective of a pipeline's stages.

    Raises ValueError if layers differ.
    """
    degree, stages = _degree(module), zpartition.pipeline_stages_of(module)
    if stages.size > 1:  # other layers are elsewhere
        degree = max(zcomm.all_gather_object(degree, stages.group))
    return {"expert": degree} if degree > 1 else {}


def refuse_experts(module: nn.Module, plan: Plan) -> None:
    """ValueError, with paths and numbers, if the module's experts cannot be shared out as planned; asks nobody."""
    if _is_to_do(module, plan):
        from zpartition import experts

        experts.divisible_experts(module, plan.parallel.degrees.expert, plan.parallel.expert_layers)


def deal_experts(module: nn.Module, plan: Plan, groups: zcomm.Groups) -> None:
    """Share the experts of `module` out in place; nothing is done where each rank has all.  All ranks call.

    Raises:
        RanksDisagree: ranks have other models or configs.
    """
    if _is_to_do(module, plan):
        from zpartition import experts

        mine = {"plan": plan_lines(plan), "parameters": parameter_lines(module)}
        compare(mine, groups.gradient())  # other stages of a pipeline have other parameters, and perhaps no experts
        pattern = plan.parallel.expert_layers
        experts.distribute(module, groups.experts(), tensor=groups.tensor(), pattern=pattern)


def _degree(module: nn.Module) -> int:
    if not is_imported("zpartition.experts"):
        return 1
    from zpartition import experts

    dealt = {deal.size for deal in zpartition.expert_shards_of(module).values()}
    return max(dealt, default=0) or experts.expert_degree(module)


def _is_to_do(module: nn.Module, plan: Plan) -> bool:
    if plan.parallel.degrees.expert == 1 or zpartition.expert_shards_of(module):
        return False
    if stage_axes(module).get("pipeline", 1) == 1:
        return True
    from zpartition import experts

    return bool(experts.find_experts(module, plan.parallel.expert_layers))  # other stages may have them all
