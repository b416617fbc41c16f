"""`shard`: partition a module under a policy."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import ProcessGroup

import zcomm
from zpartition.deferred.init import Deferred, suspend_init
from zpartition.layout.layout import Layout
from zpartition.layout.link import with_measured_buckets
from zpartition.layout.model_parallel import check_expert_groups, check_group
from zpartition.layout.plan_layouts import plan_layouts
from zpartition.layout.policy import Tier, ZeroPolicy
from zpartition.layout.ranks import Ranks
from zpartition.ownership import named_groups, reclaim_weights
from zpartition.partition import Partition
from zpartition.state import optimizer_state as state
from zpartition.state.shape_aware import accepts_cuts

__all__ = ["shard"]


@suspend_init()
def shard(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    policy: ZeroPolicy | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> Partition:
    """Partition `module` over the ranks of `group` (None: the default group, or this process alone).

    Partitions the parameters that `optimizer` holds and that require a gradient (all trainable ones without an
    optimizer).  Broadcasts rank 0's weights and buffers, and rebinds the optimizer.  A module that was built
    inside `Init` is materialized on `device`; others stay on their device.  `Init` blocks may be open: they are
    suspended meanwhile.

    Raises:
        ValueError: the module is partitioned already; the optimizer holds parameters of another model, or needs whole
            tensors and the policy cuts them; parameters are on several devices; `group` has ranks with other parts
            of a tensor-parallel module; experts are sharded over ranks that are not consecutive in it.

    >>> import torch, zpartition
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> partition = zpartition.shard(model, optimizer, policy=zpartition.ZeroPolicy(stage=2))
    >>> with partition.micro_step(is_last=True):
    ...     model(torch.ones(1, 4)).sum().backward()
    >>> _ = partition.finish_gradients()
    >>> partition.apply(optimizer.step)
    >>> partition.zero_grad()
    """
    policy = policy or ZeroPolicy()
    reclaim_weights(module)
    check_group(module, group)
    check_expert_groups(module, group)
    groups = named_groups(module, optimizer)
    trained = (param for name, param in module.named_parameters() if name in groups)
    policy = with_measured_buckets(policy, trained, group, torch.device(device))
    layouts = plan_layouts(module, groups, policy, zcomm.group_size(group), state.block_numel(optimizer))
    if optimizer is not None:
        state.check_optimizer(optimizer, cuts=_cuts(layouts[0], policy))
        state.check_model_parallel(optimizer, layouts[0])
        _check_whole_tensors_on_disk(optimizer, policy)
    deferred = Deferred.of(module, torch.device(device))
    partition = Partition.create(
        module, layouts, policy, Ranks.of(group, policy, expert_shards_in(*layouts)), deferred
    )
    if optimizer is not None:
        try:
            partition.rebind(optimizer)
        except BaseException:
            partition.close(keep_weights=False)  # not a collective: other ranks may not have failed
            raise
    return partition


def expert_shards_in(*layouts: Layout) -> frozenset[int]:
    """Return the numbers of ranks that experts are sharded over."""
    return frozenset(bucket.num_expert_shards for layout in layouts for bucket in layout.buckets) - {1}


def _cuts(layout: Layout, policy: ZeroPolicy) -> bool:
    """Return whether the optimizer updates flat shards, or separate masters, instead of whole tensors."""
    is_apart = any(policy.master_for(bucket.dtype) != bucket.dtype for bucket in layout.buckets)
    return layout.num_shards > 1 or policy.offload.moves_states or is_apart


def _check_whole_tensors_on_disk(optimizer: torch.optim.Optimizer, policy: ZeroPolicy) -> None:
    """Raise ValueError for an optimizer that needs all tensors in memory at once with states on disk."""
    if policy.offload.states is Tier.DISK and policy.offload.moves_states and accepts_cuts(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} needs all tensors in each step, and Offload(states=DISK) keeps only a few "
            "in memory at a time. Use states=Tier.HOST, or an elementwise optimizer (AdamW, SGD, Lion, ...)."
        )
