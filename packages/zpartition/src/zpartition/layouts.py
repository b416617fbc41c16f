"""The layouts of a module: which parameters are trained, which rest as shards, and where they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import nn

from zpartition.cells import addresses_of, deals_of
from zpartition.layout import SLOT_ALIGNMENT, Layout, ParamSpec, plan_layout
from zpartition.policy import SparseGradients, ZeroPolicy
from zpartition.ranks import shard_group_size
from zpartition.units import plan_units

__all__ = ["plan_added", "plan_layouts"]


def plan_layouts(
    module: nn.Module,
    groups: Mapping[str, int],
    policy: ZeroPolicy,
    world_size: int,
    alignment: int = SLOT_ALIGNMENT,
) -> tuple[Layout, Layout]:
    """The layouts of the trained parameters, whose group of the optimizer `groups` tells by name, and of the frozen
    ones that rest as shards.  `alignment`: of the places of trained ones, in elements, as the optimizer wants it.
    """
    units = _units(module, policy, world_size)
    others = {name: param for name, param in module.named_parameters() if name not in groups}
    resting = {n: 0 for n, p in others.items() if units.get(n) is not None and p.is_floating_point()}
    trained = _layout(module, groups, units, policy, world_size, alignment)
    return trained, _layout(module, resting, units, policy, world_size, SLOT_ALIGNMENT)


def plan_added(
    module: nn.Module,
    groups: Mapping[str, int],
    policy: ZeroPolicy,
    world_size: int,
    first_index: int,
    alignment: int = SLOT_ALIGNMENT,
) -> Layout:
    """A layout of the parameters in `groups` alone, whose buckets are numbered from `first_index` on."""
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
    narrow = _narrow_names(module, policy.narrow_classes)
    sparse = _sparse_names(module) if policy.sparse_gradients is SparseGradients.ROWS else frozenset()
    addresses, deals = addresses_of(module), deals_of(module)
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
            deals[name].size if name in deals else 1,
        )
        for name, param in module.named_parameters()
        if name in chosen
    ]
    num_shards = 1 if policy.keeps_whole else shard_group_size(policy, world_size)
    return plan_layout(
        specs, world_size=world_size, num_shards=num_shards, bucket_numel=policy.bucket_numel, alignment=alignment
    )


def _narrow_names(module: nn.Module, classes: Sequence[str]) -> frozenset[str]:
    """Parameters that modules of these classes hold themselves."""
    owners = {
        id(param)
        for child in module.modules()
        if any(is_class(type(child), name) for name in classes)
        for param in child.parameters(recurse=False)
    }
    return frozenset(name for name, param in module.named_parameters() if id(param) in owners)


def is_class(kind: type, name: str) -> bool:
    """Whether `name` means the class `kind`: "Linear", "torch.nn.Linear" and "torch.nn.modules.linear.Linear" do."""
    path, _, last = name.rpartition(".")
    return last == kind.__name__ and (not path or f"{kind.__module__}.".startswith(f"{path}."))


def _sparse_names(module: nn.Module) -> frozenset[str]:
    """Weights of embeddings that were made with sparse=True."""
    owners = {
        id(child.weight)
        for child in module.modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
    }
    return frozenset(name for name, param in module.named_parameters() if id(param) in owners)
