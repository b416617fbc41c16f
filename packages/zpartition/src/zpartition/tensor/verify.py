"""Verify a plan: run a small input through the model and through a split copy of it, and compare.

Outputs and all gradients are compared.  A plan that mixes columns of different ranks gives errors about as large as
the values, so the tolerances only have to exceed rounding.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import zcomm
from zpartition._compat import tree_flatten
from zpartition.layout.model_parallel import ALONE, addresses_of
from zpartition.tensor.parallel_region import ParallelRegion
from zpartition.tensor.parallelize import apply_splits, parallelize
from zpartition.tensor.plan import TensorPlan, resolve
from zpartition.tensor.styles import Column, Row, Vocabulary
from zpartition.tensors.whole import part_of

__all__ = ["find_problem", "verify"]

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}  # of the largest
_GRADIENT = "gradient of "


def verify(
    model: nn.Module,
    plan: TensorPlan,
    group: ProcessGroup | None = None,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Run `model(*args, **kwargs)` whole and split over the ranks of `group`, and compare.

    All ranks call it with the same whole model and input.  The model is not changed; two copies of it (and gradients)
    are held meanwhile.  Modules are in evaluation mode, so no random numbers are drawn.

    Raises:
        ValueError: on every rank, with the first difference in the order of the model and its size, or the error of
            the split copy.
    """
    if problem := find_problem(model, plan, group, args, kwargs or {}):
        raise ValueError(
            f"the tensor-parallel plan does not fit {type(model).__name__}: {problem}. An operation between a column "
            "and a row layer mixes columns of different ranks, or a module keeps its head count under an unknown "
            "name. Keep those layers whole, with Replicated() or without rules, or make the activations between them "
            "whole: Column(gathers=True) and Row(takes_part=True)."
        )


def find_problem(
    model: nn.Module, plan: TensorPlan, group: ProcessGroup | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Return the problem of a plan, the same on all ranks; "" if there is none.  Raises as `resolve` does."""
    problem = _first_problem(_dry_run(model, plan, group, args, kwargs), group)
    if problem:
        return problem
    parts = copy.deepcopy(model).eval()
    parallelize(parts, plan, group)
    whole = copy.deepcopy(model).eval()
    for tensor in [*whole.parameters(), *whole.buffers()]:
        tensor.data = tensor.data.contiguous()
        zcomm.broadcast(tensor.data, group, source=0, label="verify")
    return _first_problem(_find_difference(parts, _run(whole, args, kwargs), _run(parts, args, kwargs)), group)


def _dry_run(
    model: nn.Module, plan: TensorPlan, group: ProcessGroup | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Run this rank's part without communication: a failure on one rank would leave others waiting.

    Layers whose outputs or inputs are joined are whole here.
    """
    mine = copy.deepcopy(model).eval()
    splits = resolve(plan, mine, zcomm.group_size(group), zcomm.group_rank(group))
    local = [split for split in splits if not (isinstance(split.style, Column) and split.style.gathers)]
    local = [split for split in local if not (isinstance(split.style, Row) and split.style.takes_part)]
    apply_splits(mine, [split for split in local if not isinstance(split.style, Vocabulary)], ParallelRegion(ALONE))
    try:
        with torch.no_grad():
            mine(*args, **kwargs)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        return f"a rank's part fails with {type(error).__name__}: {error}"
    return ""


def _find_difference(parts: nn.Module, expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> str:
    """Return the first value that differs; "" if there is none."""
    addresses = addresses_of(parts)
    scale = max((float(v.double().abs().max()) for n, v in expected.items() if n.startswith(_GRADIENT)), default=0.0)
    for name, value in expected.items():
        at = addresses.get(name.removeprefix(_GRADIENT))
        reference = (value if at is None else part_of(value, at)).double()
        largest = float(value.double().abs().max())
        magnitude = max(largest, scale / 1000 if name.startswith(_GRADIENT) else 0.0)
        tolerance = _TOLERANCES.get(value.dtype, 1e-3) * magnitude
        is_comparable = got[name].shape == reference.shape
        error = float((got[name].double() - reference).abs().max()) if is_comparable else math.inf
        if not error <= tolerance:
            return f"{name} differs by {error:.3g}, its largest value is {largest:.3g}"
    return ""


def _first_problem(problem: str, group: ProcessGroup | None) -> str:
    """Return the problem of the first rank that has one."""
    return next((each for each in zcomm.all_gather_object(problem, group) if each), "")


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return outputs by number, then gradients of the sum of their squares, last layers first."""
    with torch.enable_grad():
        outputs = [leaf for leaf in tree_flatten(model(*args, **kwargs))[0] if _is_number(leaf)]
        found = {f"output {index}": leaf.detach() for index, leaf in enumerate(outputs)}
        squares = [leaf.float().square().mean() for leaf in outputs if leaf.requires_grad]
        if squares:
            torch.stack(squares).sum().backward()  # type: ignore[no-untyped-call]
    return {**found, **dict(_gradients(model))}


def _gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, param in reversed(list(model.named_parameters())):
        if param.grad is not None:
            yield f"{_GRADIENT}{name}", param.grad


def _is_number(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() > 0
