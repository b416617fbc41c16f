"""Expert parallelism: distributes the experts of a module, if the config or its MoE layers ask for it.

The experts of a layer go to consecutive ranks that sum gradients, so they need no extra ranks.  Supported are
`zpartition.experts.MoE` layers, blocks of Transformers, whose experts are stacked in parameters, and layers with an
`nn.ModuleList` of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

import zcomm
import zpartition
from zengine.build.agreement import compare, parameter_lines, plan_lines
from zengine.build.pipeline import pipeline_axes
from zengine.imports import is_imported

if TYPE_CHECKING:
    from zengine.config import Plan

__all__ = ["check_experts", "distribute_experts", "expert_axes"]


def expert_axes(module: nn.Module) -> Mapping[str, int]:
    """Return the degree that the module's layers have, or ask for (`ep_size`).  A collective of a pipeline's stages.

    Raises:
        ValueError: layers differ.
    """
    degree, stages = _degree(module), zpartition.pipeline_stages_of(module)
    if stages.size > 1:  # other layers are elsewhere
        degree = max(zcomm.all_gather_object(degree, stages.group))
    return {"expert": degree} if degree > 1 else {}


def check_experts(module: nn.Module, plan: Plan) -> None:
    """Raise ValueError if the module's experts cannot be distributed as planned; no collective."""
    if _must_distribute(module, plan):
        from zpartition import experts

        experts.divisible_experts(module, plan.parallel.degrees.expert, plan.parallel.expert_layers)


def distribute_experts(module: nn.Module, plan: Plan, groups: zcomm.Groups) -> None:
    """Distribute the experts of `module` in place, if the plan asks for it.  All ranks call.

    Raises:
        RanksDisagree: ranks have different models or configs.
    """
    if _must_distribute(module, plan):
        from zpartition import experts

        mine = {"plan": plan_lines(plan), "parameters": parameter_lines(module)}
        compare(mine, groups.gradient())  # other stages have other parameters, and maybe no experts
        pattern = plan.parallel.expert_layers
        experts.distribute(module, groups.experts(), tensor=groups.tensor(), pattern=pattern)


def _degree(module: nn.Module) -> int:
    if not is_imported("zpartition.experts"):
        return 1
    from zpartition import experts

    sizes = {shards.size for shards in zpartition.expert_shards_of(module).values()}
    return max(sizes, default=0) or experts.expert_degree(module)


def _must_distribute(module: nn.Module, plan: Plan) -> bool:
    if plan.parallel.degrees.expert == 1 or zpartition.expert_shards_of(module):
        return False
    if pipeline_axes(module).get("pipeline", 1) == 1:
        return True
    from zpartition import experts

    return bool(experts.find_experts(module, plan.parallel.expert_layers))  # other stages may have all experts
