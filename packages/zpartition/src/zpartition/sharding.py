"""`shard`: from a module and a policy to a `Partition`."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import ProcessGroup

import zcomm
from zpartition import state
from zpartition.admission import named_groups, refuse_hollow, refuse_owned
from zpartition.cells import refuse_misdealt, refuse_mixed
from zpartition.deferred import Deferred
from zpartition.hidden import show
from zpartition.layout import Layout
from zpartition.layouts import plan_layouts
from zpartition.offload import Tier
from zpartition.partition import Partition
from zpartition.policy import ZeroPolicy
from zpartition.ranks import Ranks
from zpartition.shapes import takes_cuts

__all__ = ["shard"]


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
            needs whole tensors and the policy cuts them; parameters are spread over devices; `group` has ranks that
            hold other parts of a tensor-parallel module; experts are dealt out to ranks that are no run of it.
    """
    policy = policy or ZeroPolicy()
    show(module.parameters())
    for name, param in module.named_parameters():
        refuse_owned(name, param)
        refuse_hollow(name, param)
    refuse_mixed(module, group)
    refuse_misdealt(module, group)
    groups = named_groups(module, optimizer)
    layouts = plan_layouts(module, groups, policy, zcomm.group_size(group), state.block_numel(optimizer))
    if optimizer is not None:
        state.refuse_unfit(optimizer, cuts=_cuts(layouts[0], policy))
        state.refuse_cells(optimizer, layouts[0])
        _refuse_whole_tensors_on_disk(optimizer, policy)
    deferred = Deferred.of(module, torch.device(device))
    partition = Partition.create(module, layouts, policy, Ranks.of(group, policy, deals_in(*layouts)), deferred)
    if optimizer is not None:
        try:
            partition.rebind(optimizer)
        except BaseException:
            partition.close(keep_weights=False)  # nobody's again; other ranks may not come along
            raise
    return partition


def deals_in(*layouts: Layout) -> frozenset[int]:
    """Into runs of how many ranks buckets are dealt out."""
    return frozenset(bucket.deal for layout in layouts for bucket in layout.buckets) - {1}


def _cuts(layout: Layout, policy: ZeroPolicy) -> bool:
    """Whether the optimizer is given flat shards, or masters beside the weights, in place of whole tensors."""
    is_apart = any(policy.master_for(bucket.dtype) != bucket.dtype for bucket in layout.buckets)
    return layout.num_shards > 1 or policy.offload.moves_states or is_apart


def _refuse_whole_tensors_on_disk(optimizer: torch.optim.Optimizer, policy: ZeroPolicy) -> None:
    """ValueError for an optimizer that has to have all tensors in memory at once, and a policy that never has."""
    if policy.offload.states is Tier.DISK and policy.offload.moves_states and takes_cuts(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} looks at whole tensors in each step, and Offload(states=DISK) has few of "
            "them in memory at a time. Use states=Tier.HOST, or an elementwise optimizer (AdamW, SGD, Lion, ...)."
        )
