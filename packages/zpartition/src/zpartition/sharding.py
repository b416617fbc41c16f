"""`shard`: from a module and a policy to a `Partition`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed import ProcessGroup

import zcomm
from zpartition import state
from zpartition.admission import named_groups, refuse_hollow, refuse_owned
from zpartition.deferred import Deferred
from zpartition.layout import Layout, ParamSpec, plan_layout
from zpartition.offload import Tier
from zpartition.partition import Partition
from zpartition.policy import SparseGradients, ZeroPolicy
from zpartition.ranks import Ranks, shard_group_size
from zpartition.shapes import takes_cuts
from zpartition.units import plan_units

__all__ = ["plan_layouts", "shard"]


def shard(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    policy: ZeroPolicy | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> Partition:
    """Partition `module` over the ranks of `group` (None: the default group, or this process alone).

    Only parameters that `optimizer` holds and that require a gradient are partitioned (all trainable ones
    when there is no optimizer).  Weights and buffers are made equal to rank 0's.  The optimizer is rebound.
    A module that was built inside `Init` gets its values now, on `device`; others stay where they are.

    Raises:
        ValueError: the module is partitioned already; the optimizer holds parameters of another model; it
            needs whole tensors and the policy cuts them; parameters are spread over devices.
    """
    policy = policy or ZeroPolicy()
    for name, param in module.named_parameters():
        refuse_owned(name, param)
        refuse_hollow(name, param)
    groups = named_groups(module, optimizer)
    layouts = plan_layouts(module, groups, policy, zcomm.group_size(group))
    if optimizer is not None:
        state.refuse_unfit(optimizer, cuts=layouts[0].num_shards > 1 or policy.offload.moves_states)
        _refuse_whole_tensors_on_disk(optimizer, policy)
    deferred = Deferred.of(module, torch.device(device))
    partition = Partition.create(module, layouts, policy, Ranks.of(group, policy), deferred)
    if optimizer is not None:
        partition.rebind(optimizer)
    return partition


def _refuse_whole_tensors_on_disk(optimizer: torch.optim.Optimizer, policy: ZeroPolicy) -> None:
    """ValueError for an optimizer that has to have all tensors in memory at once, and a policy that never has."""
    if policy.offload.states is Tier.DISK and policy.offload.moves_states and takes_cuts(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} looks at whole tensors in each step, and Offload(states=DISK) has few of "
            "them in memory at a time. Use states=Tier.HOST, or an elementwise optimizer (AdamW, SGD, Lion, ...)."
        )


def plan_layouts(
    module: nn.Module, groups: Mapping[str, int], policy: ZeroPolicy, world_size: int
) -> tuple[Layout, Layout]:
    """The layouts of the trained parameters and of the frozen ones that rest as shards."""
    copy_size = shard_group_size(policy, world_size)
    units = plan_units(module, policy) if policy.shards_weights and copy_size > 1 else {}

    sparse = _sparse_names(module) if policy.sparse_gradients is SparseGradients.ROWS else frozenset()

    def layout(chosen: Mapping[str, int]) -> Layout:
        specs = [
            ParamSpec(name, tuple(param.shape), param.dtype, chosen[name], units.get(name), name in sparse)
            for name, param in module.named_parameters()
            if name in chosen
        ]
        num_shards = 1 if policy.keeps_whole else copy_size
        return plan_layout(specs, world_size=world_size, num_shards=num_shards, bucket_numel=policy.bucket_numel)

    others = {name: param for name, param in module.named_parameters() if name not in groups}
    frozen = {n: 0 for n, p in others.items() if units.get(n) is not None and p.is_floating_point()}
    return layout(groups), layout(frozen)


def _sparse_names(module: nn.Module) -> frozenset[str]:
    """Weights of embeddings that were made with sparse=True."""
    owners = {
        id(child.weight)
        for child in module.modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
    }
    return frozenset(name for name, param in module.named_parameters() if id(param) in owners)
