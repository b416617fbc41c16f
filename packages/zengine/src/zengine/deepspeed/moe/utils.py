"""`deepspeed.moe.utils`: expert parameters, and optimizer groups for them.

Experts need no optimizer group of their own here: they have their own buckets in any group, and their gradients are
normalized as in a model with all experts on one rank.  Separate groups (for another learning rate, say) work too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from zpartition.experts import ExpertParameter, MoE

__all__ = [
    "configure_moe_param_groups",
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "split_params_grads_into_shared_and_expert_params",
    "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
]

_GROUP_NUMEL = 178956971  # DeepSpeed's default


def has_moe_layers(module: nn.Module) -> tuple[bool, int]:
    """Return (True if there are MoE layers, number of experts of the last one)."""
    found = [child.num_experts for child in module.modules() if isinstance(child, MoE)]
    return bool(found), found[-1] if found else 0


def is_moe_param(param: Tensor) -> bool:
    """Return True if `param` belongs to experts: of our layers, or marked `allreduce = False`."""
    return isinstance(param, ExpertParameter) or not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Return True if an optimizer group was made for experts."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(params: Iterable[Parameter]) -> tuple[list[Any], list[Any]]:
    """Return (shared parameters, expert parameters), in order."""
    given = list(params)
    return [p for p in given if not is_moe_param(p)], [p for p in given if is_moe_param(p)]


def split_params_grads_into_shared_and_expert_params(group: Iterable[Parameter]) -> tuple[list[Any], list[Any]]:
    """Return (gradients of shared parameters, gradients of experts), without None."""
    shared, experts = split_params_into_shared_and_expert_params(group)
    return [p.grad for p in shared if p.grad is not None], [p.grad for p in experts if p.grad is not None]


def configure_moe_param_groups(model_parameters: Any) -> list[Any]:
    """Return optimizer groups with separate experts, from a list of parameters or groups.

    Raises TypeError for anything else.
    """
    if not isinstance(model_parameters, list):
        raise TypeError(f"model_parameters must be a list, got {type(model_parameters).__name__}.")
    if all(isinstance(item, dict) for item in model_parameters):
        return split_params_into_different_moe_groups_for_optimizer(model_parameters)
    return split_params_into_different_moe_groups_for_optimizer({"params": model_parameters, "name": "dense-params"})


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Any, max_group_size: int | float | None = _GROUP_NUMEL
) -> list[dict[str, Any]]:
    """Return the groups without experts, then groups of experts, marked "moe", with the options of their old group.

    max_group_size: maximum elements of a group of experts; None: no limit.
    """
    given = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    dense, experts = [], []
    for index, group in enumerate(given):
        shared, own = split_params_into_shared_and_expert_params(group["params"])
        dense.append({**group, "params": shared})
        name = f"{group.get('name', f'group {index}')}, experts"
        for part in _within(own, max_group_size):
            experts.append({**group, "params": part, "name": name, "moe": True})
    return [*dense, *experts]


def _within(params: list[Any], limit: int | float | None) -> Iterator[list[Any]]:
    """Yield consecutive `params` of at most `limit` elements, or a single larger one."""
    part: list[Any] = []
    for param in params:
        if part and limit is not None and sum(p.numel() for p in part) + param.numel() > limit:
            yield part
            part = []
        part.append(param)
    if part:
        yield part
