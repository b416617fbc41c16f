"""Splits the module over the tensor ranks, where the config or a mesh asks for it and nobody has done it.

The plan comes from the first of: the config's own, the model's (`tp_plan`, as Transformers' models have), or the
model's behaviour: inferred from one small input and verified by running it whole and split.  That input is a sample
of the training data, or the `dummy_inputs` of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import zcomm
import zpartition
from zengine.agreement import compare, parameter_lines, plan_lines
from zengine.data.tree import mapped
from zpartition import tensor

if TYPE_CHECKING:
    from zengine.config import Plan
    from zpartition.tensor import TensorPlan

__all__ = ["first_batch", "split_tensors"]


def split_tensors(
    module: nn.Module, plan: Plan, groups: zcomm.Groups, device: torch.device, sample: Callable[[], Any]
) -> None:
    """Split `module` in place over the tensor ranks; nothing is done where there is one, or it is split already.

    sample: a small batch, as forward gets it; None if there is none.  All ranks call.

    Raises:
        RanksDisagree: ranks have other models or configs.
        ValueError: what the plan in use has against the model; or there is no plan and no input to infer one from.
    """
    if plan.parallel.degrees.tensor == 1 or zpartition.cell_of(module).size > 1:
        return
    compare({"plan": plan_lines(plan), "parameters": parameter_lines(module)}, groups.everybody())
    module.to(device)
    tensor.parallelize(module, _plan_of(module, groups, sample), groups.tensor())


def first_batch(dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, device: torch.device) -> Any:
    """One sample as a batch on `device`; None without a dataset that has one."""
    if dataset is None or not hasattr(dataset, "__getitem__"):
        return None
    collate = collate_fn or torch.utils.data.default_collate
    return mapped(collate([dataset[0]]), lambda leaf: leaf.to(device))


def _plan_of(module: nn.Module, groups: zcomm.Groups, sample: Callable[[], Any]) -> TensorPlan:
    own = getattr(module, "tp_plan", None)
    if own and any("row" in style and "embedding" not in style for style in own.values()):  # not of the head alone
        return tensor.read_tp_plan(own, module)
    batch = None if getattr(module, "dummy_inputs", None) else sample()
    args, kwargs = _arguments(batch)
    return tensor.fitted_plan(module, groups.tensor(), *args, kwargs=kwargs, vocabulary=False)


def _arguments(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """How a loop would call the model with `batch`."""
    if batch is None:
        return (), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}
