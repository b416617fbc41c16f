"""Shard the experts of a model over ranks, in place."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed import ProcessGroup

import zcomm
from zpartition.deferred.fake_device import clear_fake_device
from zpartition.deferred.init import recording_if_deferred, recordings_of, share_seeds
from zpartition.experts.huggingface import num_experts_of, shard_hf_experts
from zpartition.experts.layer import MoE
from zpartition.experts.module_list import check_expert_list, shard_expert_list
from zpartition.experts.stacked import Experts, check_divisible
from zpartition.layout.expert_lists import is_expert_list, is_sharded_list
from zpartition.layout.hf_experts import is_hf_experts, is_sharded_hf_experts
from zpartition.layout.model_parallel import ALONE, ModelParallelGroup
from zpartition.ownership import check_free

__all__ = ["active_fractions", "distribute", "divisible_experts", "expert_degree", "find_experts"]

Stack = Experts | nn.Module


def find_experts(model: nn.Module, pattern: str = "") -> dict[str, Stack]:
    """Find expert stacks in `model`, sharded or whole, by path: of MoE layers, of Hugging Face's blocks, and lists.

    pattern: a regular expression that a path must contain, e.g. "layers.[0-9]+.mlp".
    """
    found = {
        path: child
        for path, child in model.named_modules()
        if isinstance(child, Experts) or _is_hf(child) or _is_list(model, path, child)
    }
    return {path: child for path, child in found.items() if re.search(pattern, path)}


def expert_degree(model: nn.Module) -> int:
    """Return the `ep_size` of the model's MoE layers, 1 if there are none.  Raises ValueError if they differ."""
    sizes = {path: child.ep_size for path, child in model.named_modules() if isinstance(child, MoE)}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{path} has {size}" for path, size in sizes.items())
        raise ValueError(f"MoE layers of one model have different ep_size ({listed}): give all layers the same.")
    return next(iter(sizes.values()), 1)


def distribute(
    model: nn.Module,
    group: ProcessGroup | None,
    *,
    tensor: ProcessGroup | None = None,
    pattern: str = "",
) -> tuple[str, ...]:
    """Shard the experts of `model` over the ranks of `group`, in place; returns the paths of the expert stacks.

    Every rank of the group calls it with a whole model, and the experts of rank 0 are broadcast.  Parameters keep
    their names and identities.  `zpartition.shard` over a group in which `group` is a run of consecutive ranks then
    reduces gradients of experts over the ranks that hold the same ones.  Collective.

    tensor: ranks with the same data, over which layers with `enable_expert_tensor_parallelism` split each expert;
        None: no such ranks (for all ranks pass torch.distributed.group.WORLD).

    Raises:
        ValueError: no experts are found, they or their inner sizes do not divide, an expert cannot be split, or the
            model is partitioned, under construction, or sharded already; raised before anything is sent or changed.
    """
    size = zcomm.group_size(group)
    stacks = divisible_experts(model, size, pattern)
    layers = [child for child in model.modules() if isinstance(child, MoE)]
    wide = {id(layer.experts) for layer in layers if layer.enable_expert_tensor_parallelism}
    mp_group = ModelParallelGroup.of(tensor) if tensor is not None and zcomm.group_size(tensor) > 1 else ALONE
    mp_groups = {path: mp_group if id(stack) in wide else ALONE for path, stack in stacks.items()}
    _check_shardable(stacks, size, mp_groups)
    expert_group = ModelParallelGroup.of(zcomm.duplicate_group(group)) if size > 1 else ALONE
    has_lists = size > 1 and any(isinstance(stack, nn.ModuleList) for stack in stacks.values())
    # their gradients become complete in another order on each rank: no other messages may use the group
    list_group = ModelParallelGroup.of(zcomm.duplicate_group(expert_group.group)) if has_lists else expert_group
    if mp_group.size > 1:
        for recorded in recordings_of(model):
            share_seeds(recorded, tensor)  # `shard` does it over the others
    for path, stack in stacks.items():
        _broadcast_experts(path, stack, group)
        if mp_group.size > 1:
            _broadcast_experts(path, stack, tensor)
        with recording_if_deferred(stack):
            if isinstance(stack, Experts):
                stack.shard(expert_group, mp_groups[path])
            elif isinstance(stack, nn.ModuleList):
                parent, _, name = path.rpartition(".")
                shard_expert_list(model.get_submodule(parent), path, name, list_group)
            else:
                shard_hf_experts(stack, expert_group)
    return tuple(stacks)


def divisible_experts(model: nn.Module, size: int, pattern: str = "") -> dict[str, Stack]:
    """Return `find_experts` if the experts divide by `size` ranks.  Raises ValueError with paths and numbers."""
    stacks = find_experts(model, pattern)
    if not stacks:
        at = f" at paths with {pattern!r}" if pattern else ""
        raise ValueError(
            f"no experts found in {type(model).__name__}{at} to shard over {size} ranks: it needs "
            "zpartition.experts.MoE layers, blocks with experts stacked in parameters, as in Transformers since "
            'version 5, or layers with an nn.ModuleList of experts: of one class, called "experts" or beside a '
            "child called gate or router. Do not use expert parallelism for a dense model."
        )
    for path, stack in stacks.items():
        clear_fake_device(stack.parameters())
        check_free({f"{path}.{name}": param for name, param in stack.named_parameters()})
        try:
            if is_sharded_hf_experts(stack):
                raise ValueError("it is sharded already: distribute() may be called once.")
            if isinstance(stack, nn.ModuleList):
                check_expert_list(path, stack, size)
            else:
                check_divisible(num_experts_of(stack), size)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return stacks


def _check_shardable(stacks: Mapping[str, Stack], size: int, mp_groups: Mapping[str, ModelParallelGroup]) -> None:
    """Raise ValueError, with the path, if experts are sharded already or cannot be split over their tensor ranks."""
    for path, stack in stacks.items():
        if isinstance(stack, Experts):
            try:
                stack.check_parts(size, mp_groups[path].size)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None


def _broadcast_experts(path: str, stack: nn.Module, group: ProcessGroup | None) -> None:
    """Broadcast the experts of rank 0."""
    with torch.no_grad():
        for name, param in stack.named_parameters():
            if not param.is_meta:
                param.data = param.data.contiguous()
                zcomm.broadcast(param.data, group, source=0, label=f"{path}.{name}")


_NAMES = ("top_k", "num_experts_per_tok", "k")  # attributes with the number of experts per token


def active_fractions(model: nn.Module) -> Mapping[int, float]:
    """Return k / experts for each expert parameter, by id: the fraction that is active for one token.

    It counts for FLOPs, while memory holds all parameters.  1.0 if k is unknown.
    """
    fractions: dict[int, float] = {}
    for path, stack in model.named_modules():
        is_list = isinstance(stack, nn.ModuleList) and _is_list(model, path, stack)
        if not (isinstance(stack, Experts) or _is_hf(stack) or is_list):
            continue
        parent = model.get_submodule(path.rpartition(".")[0])
        k = parent.gate.rule.k if isinstance(parent, MoE) else _num_active(parent, stack)
        number = num_experts_of(stack)
        fractions.update({id(param): min(1.0, k / number) if k else 1.0 for param in stack.parameters()})
    return fractions


def _is_hf(child: nn.Module) -> bool:
    return is_hf_experts(child) or is_sharded_hf_experts(child)


def _is_list(model: nn.Module, path: str, child: nn.Module) -> bool:
    """Check if a child is a list of experts, sharded or whole."""
    parent, _, name = path.rpartition(".")
    layer = model.get_submodule(parent)
    return path != "" and (is_expert_list(name, child, layer) or is_sharded_list(child, layer))


def _num_active(parent: nn.Module, stack: nn.Module) -> int:
    """Return the experts per token that a block of another library declares; 0 if none."""
    for module in (parent, *parent.children(), stack):
        for name in _NAMES:
            found = getattr(module, name, None)
            if isinstance(found, int) and not isinstance(found, bool) and found > 0:
                return found
    return 0
