"""Unfreezing: train parameters that were frozen when the module was partitioned.

Problem.  A frozen parameter has no gradient bucket, no master and no state, and at stage 3 it lies among the frozen
weights of its unit.  Fine-tuning unfreezes one part of a model after the other, in the middle of a run.

Design.  Between two steps no gradient, gathered unit or message is in flight.  So parameters that begin to require a
gradient get buckets of their own, behind the existing ones, and what depends on all buckets (reducer, unsharder,
hooks) is created again around the old ones.  No weight, master or state of other parameters moves.  All ranks do it
together, and first compare the unfrozen names (`UnfreezeSync`).

A parameter joins the parameter group that held it when the module was partitioned, or one that was added since with
`optimizer.add_param_group`.

[Note: unfreeze sync] If only some ranks unfreeze a parameter, the others continue with the gradients, and all ranks
deadlock.  If there are frozen parameters and several ranks, each rank submits a digest of its unfrozen names in the
first forward pass of a step: 16 bytes on the host, without waiting.  A rank with unfrozen parameters waits for the
others at once; the rest wait before they send gradients (at stage 3 before they gather weights).

Rejected.  Memory for everything that might be unfrozen later (with adapters, masters and states of the whole model);
closing the partition and creating another (at stage 3 the whole model would be in memory).  For the sync: a message
at every forward (evaluation runs on one rank alone); a message only if something was found (the others cannot
answer); the statistics at the boundary, which come one step too late.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import final

import attrs
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

import zcomm
from zpartition._compat import any_requires_grad
from zpartition.core import PartitionState, make_reducer
from zpartition.layout.layout import Layout
from zpartition.layout.plan_layouts import plan_added
from zpartition.offload.manager import OffloadManager
from zpartition.ownership import acquire_ownership
from zpartition.state import shape_aware as shapes
from zpartition.state.optimizer_state import Holder, block_numel
from zpartition.weights.hooks import UnshardHooks
from zpartition.weights.sharded import ShardedStorage, make_storage
from zpartition.weights.storage import BucketStorage
from zpartition.weights.unshard import Unsharder

__all__ = ["UnfreezeSync", "admit", "check_frozen", "frozen_groups_of", "unfrozen"]


def unfrozen(partition: PartitionState) -> list[str]:
    """Return the names of parameters that were frozen and require a gradient now."""
    if not any_requires_grad(*partition.frozen_params.values()):  # called at every forward: no loop in Python
        return []
    return [name for name, param in partition.frozen_params.items() if param.requires_grad]


def check_frozen(partition: PartitionState) -> None:
    """Raise ValueError if there are unfrozen parameters: no optimizer would update them."""
    for name in unfrozen(partition):
        raise ValueError(
            f"parameter {name} requires a gradient, but was frozen when the module was partitioned, so no optimizer "
            "updates it. Freeze it again, or call the partition's admit_unfrozen() on all ranks before the forward "
            "pass of a step (a zengine engine calls it if you unfreeze between two steps)."
        )


def frozen_groups_of(partition: PartitionState, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the parameter groups that hold frozen parameters, by name."""
    names = {id(param): name for name, param in partition.frozen_params.items()}
    groups = enumerate(optimizer.param_groups)
    return {names[id(p)]: index for index, group in groups for p in group["params"] if id(p) in names}


def admit(partition: PartitionState, manager: OffloadManager, unfreeze_sync: UnfreezeSync) -> tuple[str, ...]:
    """Train unfrozen parameters from now on; returns their names.  See `Partition.admit_unfrozen`."""
    names = unfrozen(partition)
    if names:
        _check_between_steps(partition, names)
    unfreeze_sync.submit(names)
    if names or partition.unsharder.units:
        unfreeze_sync.wait()
    if not names:
        return ()
    groups = _groups(partition, names)
    partition.speculative_step.close()
    everything = dict(partition.module.named_parameters())
    thawed = [s for s in partition.frozen if any(slot.name in groups for slot in s.bucket.slots)]
    _unshard_frozen(partition, thawed)
    size = partition.layout.world_size
    blocks = block_numel(partition.optimizer)
    added = plan_added(partition.module, groups, partition.policy, size, len(partition.layout.buckets), blocks)
    rest = {slot.name: 0 for storage in thawed for slot in storage.bucket.slots if slot.name not in groups}
    still_frozen = plan_added(partition.module, rest, partition.policy, size, len(partition.frozen))
    manager.extend(added)
    ranks = partition.ranks
    new = [manager.adopt(make_storage(b, everything, partition.policy, ranks)) for b in added.buckets]
    kept = [storage for storage in partition.frozen if storage not in thawed]
    remade = [
        manager.place_params(ShardedStorage.of(b, everything, partition.policy, ranks, False))
        for b in still_frozen.buckets
    ]
    _fill(partition, [*new, *remade])
    partition.frozen = (*kept, *remade)
    partition.storages = (*partition.storages, *new)
    partition.holders = (*partition.holders, *(Holder(s.master, s.pieces(partition.rank), s.placement) for s in new))
    partition.layout = attrs.evolve(partition.layout, buckets=(*partition.layout.buckets, *added.buckets))
    partition.params = {n: p for n, p in everything.items() if n in partition.params or n in groups}
    partition.frozen_params = {name: param for name, param in partition.frozen_params.items() if name not in groups}
    _rebuild(partition, manager)
    if partition.optimizer is not None:
        _enlarge(partition, partition.optimizer, manager, added, groups)
    return tuple(names)


def _check_between_steps(partition: PartitionState, names: Sequence[str]) -> None:
    """Raise ValueError in the middle of a step."""
    partition.check_resident()
    partition.unshard_hooks.drop_finished()
    is_running = bool(partition.unshard_hooks.running.open or partition.unshard_hooks.blocks)
    if is_running or any(gradient.seen or gradient.kept is not None for gradient in partition.reducer.gradients):
        where = "inside a forward pass or a gathered() block" if is_running else "in the middle of a step"
        raise ValueError(
            f"parameter {names[0]} was unfrozen {where} ({len(names)} in all). Unfreeze between two steps: after the "
            "optimizer's step (or zero_grad), before the next forward pass."
        )


def _groups(partition: PartitionState, names: Sequence[str]) -> dict[str, int]:
    """Return the parameter group of each name.  Raises ValueError for a parameter without a group."""
    if partition.optimizer is None:
        return dict.fromkeys(names, 0)
    known = {**partition.frozen_groups, **frozen_groups_of(partition, partition.optimizer)}
    for name in names:
        if name not in known:
            raise ValueError(
                f"parameter {name} requires a gradient, but is in no parameter group of the optimizer. Call "
                'optimizer.add_param_group({"params": [...]}) before the next forward pass; or create the '
                "optimizer with all parameters, frozen ones too: they cost nothing until they are unfrozen."
            )
    return {name: known[name] for name in names}


def _unshard_frozen(partition: PartitionState, storages: Sequence[ShardedStorage]) -> None:
    """Give the parameters of these frozen storages their own memory, unsharded on every rank."""
    units = {storage.bucket.unit or "": partition.unsharder.units[storage.bucket.unit or ""] for storage in storages}
    values: list[tuple[Parameter, torch.Tensor]] = []
    partition.unsharder.release_all()
    for unit in units.values():
        partition.unsharder.unshard(unit, exact=True)
        values += [(p, p.data.clone()) for s in storages if s in unit.storages for p in s.params]
        partition.unsharder.drop(unit)
    for param, value in values:
        param.data = value


def _fill(partition: PartitionState, storages: Sequence[BucketStorage | ShardedStorage]) -> None:
    """Copy the weights, with rank 0's values."""
    for storage in storages:
        holders = partition.ranks.groups_for(storage.bucket).world
        if isinstance(storage, ShardedStorage):
            storage.adopt(holders)
        else:
            zcomm.broadcast(storage.flat, holders, source=0, label=f"weights[{storage.bucket.index}]")
            storage.refresh_master()


def _rebuild(partition: PartitionState, manager: OffloadManager) -> None:
    """Recreate reducer, unsharder and hooks for the current storages."""
    old = partition.unsharder
    partition.unshard_hooks.close()
    partition.reducer.close()
    old.invalidate()  # a backward of an earlier forward must raise
    policy, ranks, device = partition.policy, partition.ranks, partition.device
    units = [s for s in (*partition.storages, *partition.frozen) if isinstance(s, ShardedStorage)]
    partition.unsharder = Unsharder.of(partition.module, units, policy, ranks, device)
    partition.unsharder.version = old.version
    partition.unshard_hooks = UnshardHooks.install(partition.module, partition.unsharder)
    non_finite_probe = partition.reducer.non_finite_probe
    partition.reducer = make_reducer(
        partition.module, partition.layout, partition.params, partition.unsharder, device
    )
    partition.reducer.non_finite_probe = non_finite_probe
    manager.attach(partition.reducer)
    partition.replicated = attrs.evolve(partition.replicated, partitioned=frozenset(map(id, partition.owned())))
    acquire_ownership(partition, [*partition.reducer.hooks, partition.unshard_hooks])


def _enlarge(
    partition: PartitionState,
    optimizer: torch.optim.Optimizer,
    manager: OffloadManager,
    added: Layout,
    groups: Mapping[str, int],
) -> None:
    """Let the optimizer update the new shards, too."""
    if partition.updates_parameters:
        partition.holders = tuple(Holder.of_parameter(n, p) for n, p in partition.params.items())
    else:
        members = {id(partition.params[name]) for name in groups}
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if id(param) not in members]
        for bucket in added.buckets:
            optimizer.param_groups[bucket.group]["params"].append(partition.storages[bucket.index].master)
        if shapes.accepts_cuts(optimizer):
            manager.step_all_at_once()
            masters = [storage.master for storage in partition.storages]
            shapes.place_over_ranks(optimizer, masters, partition.layout, partition.ranks.shard, partition.device)
    manager.hook(optimizer, partition.storages)


@final
@attrs.define(eq=False)
class UnfreezeSync:
    """Names that this rank submitted in this step; see [Note: unfreeze sync].  Without a group, the identity.

    Invariant: every rank submits once between two calls of `reset`, and again only if it finds other names.
    """

    group: ProcessGroup | None  # on the host, of all ranks that train; None: one rank, or nothing frozen
    names: tuple[str, ...] | None = None  # submitted in this step; None: not yet
    bounds: Tensor | None = None  # (2,) int64: largest digest of all ranks, and of the negatives
    handle: zcomm.Handle | None = None  # of a sync in flight

    def submit(self, names: Sequence[str]) -> None:
        """Send a digest of the names that this rank has unfrozen, once a step."""
        if self.group is None or self.names == tuple(names):
            return
        self.wait()
        digest = zlib.crc32("\n".join(names).encode())
        self.names, self.bounds = tuple(names), torch.tensor([digest, -digest], dtype=torch.int64)
        self.handle = zcomm.all_reduce(self.bounds, self.group, op="max", async_op=True, label="unfrozen parameters")

    def wait(self) -> None:
        """Wait for the other ranks, once a step.

        Raises:
            ValueError: ranks have unfrozen different parameters; on all of them.
        """
        if self.handle is None:
            return
        assert self.bounds is not None and self.names is not None, "a handle belongs to submitted names"
        names, self.names = self.names, None
        self.handle.wait()
        self.handle = None
        largest, smallest = self.bounds.tolist()
        if largest != -smallest:
            mine = f"{', '.join(names[:10])} ({len(names)} in all)" if names else "none"
            raise ValueError(
                f"ranks have unfrozen different parameters; rank {zcomm.group_rank(self.group)}: {mine}. "
                "Set requires_grad alike on all ranks."
            )
        self.names = names

    def reset(self) -> None:
        """End a step."""
        self.wait()
        self.names = None
