"""Layouts of a module: the trained parameters, the sharded frozen ones, and their positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import nn

from zpartition.layout.layout import CODE_DTYPES, SLOT_ALIGNMENT, Layout, ParamSpec, plan_layout
from zpartition.layout.model_parallel import addresses_of, expert_shards_of
from zpartition.layout.policy import SparseGradients, ZeroPolicy
from zpartition.layout.ranks import shard_group_size
from zpartition.layout.units import plan_units

__all__ = ["plan_added", "plan_layouts"]


def plan_layouts(
    module: nn.Module,
    groups: Mapping[str, int],
    policy: ZeroPolicy,
    world_size: int,
    alignment: int = SLOT_ALIGNMENT,
) -> tuple[Layout, Layout]:
    """Return the layouts of the trained parameters and of the frozen parameters that are sharded.

    groups: parameter group of each trained parameter, by name.
    alignment: of the slots of trained parameters, in elements, as required by the optimizer.
    """
    units = _units(module, policy, world_size)
    others = {name: param for name, param in module.named_parameters() if name not in groups}
    frozen = {n: 0 for n, p in others.items() if units.get(n) is not None and _can_be_sharded(p)}
    trained = _layout(module, groups, units, policy, world_size, alignment)
    return trained, _layout(module, frozen, units, policy, world_size, SLOT_ALIGNMENT)


def _can_be_sharded(param: torch.Tensor) -> bool:
    return param.is_floating_point() or param.dtype in CODE_DTYPES


def plan_added(
    module: nn.Module,
    groups: Mapping[str, int],
    policy: ZeroPolicy,
    world_size: int,
    first_index: int,
    alignment: int = SLOT_ALIGNMENT,
) -> Layout:
    """Return a layout of the parameters in `groups` alone, with buckets numbered from `first_index`."""
    layout = _layout(module, groups, _units(module, policy, world_size), policy, world_size, alignment)
    buckets = tuple(attrs.evolve(bucket, index=first_index + bucket.index) for bucket in layout.buckets)
    return attrs.evolve(layout, buckets=buckets)


def _units(module: nn.Module, policy: ZeroPolicy, world_size: int) -> Mapping[str, str | None]:
    is_cut = policy.shards_weights and shard_group_size(policy, world_size) > 1
    return plan_units(module, policy) if is_cut else {}


def _layout(
    module: nn.Module,
    chosen: Mapping[str, int],
    units: Mapping[str, str | None],
    policy: ZeroPolicy,
    world_size: int,
    alignment: int,
) -> Layout:
    num_shards = 1 if policy.keeps_whole else shard_group_size(policy, world_size)
    if not chosen:
        return Layout((), world_size, num_shards)
    narrow = _narrow_names(module, policy.narrow_classes)
    sparse = _sparse_names(module) if policy.sparse_gradients is SparseGradients.ROWS else frozenset()
    addresses, expert_groups = addresses_of(module), expert_shards_of(module)
    specs = [
        ParamSpec(
            name,
            tuple(param.shape),
            param.dtype,
            chosen[name],
            units.get(name),
            name in sparse,
            policy.narrow_dtype if name in narrow and param.dtype != torch.float64 else None,
            addresses[name],
            expert_groups[name].size if name in expert_groups else 1,
        )
        for name, param in module.named_parameters()
        if name in chosen
    ]
    return plan_layout(
        specs, world_size=world_size, num_shards=num_shards, bucket_numel=policy.bucket_numel, alignment=alignment
    )


def _narrow_names(module: nn.Module, classes: Sequence[str]) -> frozenset[str]:
    """Return the parameters that modules of these classes hold themselves."""
    if not classes:
        return frozenset()
    owners = {
        id(param)
        for child in module.modules()
        if any(is_class(type(child), name) for name in classes)
        for param in child.parameters(recurse=False)
    }
    return frozenset(name for name, param in module.named_parameters() if id(param) in owners)


def is_class(kind: type, name: str) -> bool:
    """Return whether `name` means the class `kind`: "Linear", "torch.nn.Linear", "torch.nn.modules.linear.Linear"."""
    path, _, last = name.rpartition(".")
    return last == kind.__name__ and (not path or f"{kind.__module__}.".startswith(f"{path}."))


def _sparse_names(module: nn.Module) -> frozenset[str]:
    """Return the weights of embeddings created with sparse=True."""
    owners = {
        id(child.weight)
        for child in module.modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
    }
    return frozenset(name for name, param in module.named_parameters() if id(param) in owners)
