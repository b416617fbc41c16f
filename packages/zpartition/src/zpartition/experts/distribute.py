"""`distribute`: from a model with whole layers of experts to one of which each rank has some experts."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed import ProcessGroup

import zcomm
from zpartition.admission import refuse_hollow, refuse_owned
from zpartition.cells import ALONE, Cell
from zpartition.deferred import draw_alike, noting, tapes_of
from zpartition.experts.bank import Experts, refuse_uneven
from zpartition.experts.foreign import is_foreign, share_out_foreign
from zpartition.experts.layer import MoE
from zpartition.hidden import show

__all__ = ["distribute", "expert_degree", "find_experts", "fitting_experts"]

Stack = Experts | nn.Module


def find_experts(model: nn.Module, pattern: str = "") -> dict[str, Stack]:
    """The stacks of experts in `model`, by path: those of MoE layers, and of Hugging Face's blocks.

    pattern: a regular expression that a path must contain: "layers.[0-9]+.mlp", say.
    """
    found = {path: child for path, child in model.named_modules() if isinstance(child, Experts) or is_foreign(child)}
    return {path: child for path, child in found.items() if re.search(pattern, path)}


def expert_degree(model: nn.Module) -> int:
    """The `ep_size` of the model's MoE layers, 1 where there are none.  ValueError if they differ."""
    sizes = {path: child.ep_size for path, child in model.named_modules() if isinstance(child, MoE)}
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{path} has {size}" for path, size in sizes.items())
        raise ValueError(f"layers of one model have different ep_size ({told}): give all of them the same.")
    return next(iter(sizes.values()), 1)


def distribute(
    model: nn.Module,
    group: ProcessGroup | None,
    *,
    tensor: ProcessGroup | None = None,
    pattern: str = "",
) -> tuple[str, ...]:
    """Share the experts of `model` out among the ranks of `group`, in place; returns the paths of what was found.

    Every rank of the group calls it with a whole model, of which rank 0's experts count.  Parameters keep their names
    and identities.  `zpartition.shard` over a group of which `group` is a run of neighbours then sums gradients of
    experts over those ranks that hold the same.  tensor: ranks that see the same data, and compute parts of each
    expert in layers with `enable_expert_tensor_parallelism`; None: there are none such (for all ranks give
    torch.distributed.group.WORLD).  A collective.

    Raises:
        ValueError: no experts are found, they or their inner sizes do not divide, an expert cannot be split, or the
            model is partitioned, being built, or shared out already; before anything is sent or changed.
    """
    size = zcomm.group_size(group)
    stacks = fitting_experts(model, size, pattern)
    layers = [child for child in model.modules() if isinstance(child, MoE)]
    wide = {id(layer.experts) for layer in layers if layer.enable_expert_tensor_parallelism}
    cell = Cell.of(tensor) if tensor is not None and zcomm.group_size(tensor) > 1 else ALONE
    cells = {path: cell if id(stack) in wide else ALONE for path, stack in stacks.items()}
    _refuse_parts(stacks, size, cells)
    deal = Cell.of(zcomm.twin(group)) if size > 1 else ALONE
    if cell.size > 1:
        for tape in tapes_of(model):
            draw_alike(tape, tensor)  # over the others `shard` does it
    for path, stack in stacks.items():
        _agree(path, stack, group)
        if cell.size > 1:
            _agree(path, stack, tensor)
        with noting(stack):
            if isinstance(stack, Experts):
                stack.share_out(deal, cells[path])
            else:
                share_out_foreign(stack, deal)
    return tuple(stacks)


def fitting_experts(model: nn.Module, size: int, pattern: str = "") -> dict[str, Stack]:
    """`find_experts`, if they can be shared out among `size` ranks; else ValueError, with paths and numbers."""
    stacks = find_experts(model, pattern)
    if not stacks:
        at = f" at paths with {pattern!r}" if pattern else ""
        raise ValueError(
            f"no experts are found in the {type(model).__name__}{at}, to be shared out among {size} ranks: it needs "
            "zpartition.experts.MoE layers, or blocks whose experts are stacked in parameters, as Transformers "
            "has them since version 5. Leave expert parallelism out for a dense model."
        )
    for path, stack in stacks.items():
        show(stack.parameters())
        for name, param in stack.named_parameters():
            refuse_owned(f"{path}.{name}", param)
            refuse_hollow(f"{path}.{name}", param)
        try:
            refuse_uneven(int(stack.num_experts), size)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return stacks


def _refuse_parts(stacks: Mapping[str, Stack], size: int, cells: Mapping[str, Cell]) -> None:
    """ValueError, with the path, for experts that are shared out already, or cannot be split over their cell."""
    for path, stack in stacks.items():
        if isinstance(stack, Experts):
            try:
                stack.check_parts(size, cells[path].size)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None


def _agree(path: str, stack: nn.Module, group: ProcessGroup | None) -> None:
    """All ranks start from the experts of rank 0."""
    with torch.no_grad():
        for name, param in stack.named_parameters():
            if not param.is_meta:
                param.data = param.data.contiguous()
                zcomm.broadcast(param.data, group, source=0, label=f"{path}.{name}")
