"""Parameters that were frozen when the module was partitioned, and are to be trained from now on.

Problem.  What is frozen has no gradient bucket, no master and no state, and at stage 3 it lies among the frozen
weights of its unit.  Fine-tuning unfreezes one part of a model after the other, in the middle of a run.

Design.  Between two steps nothing is under way: no gradient, no gathered unit, no message.  So the parameters that
have begun to require a gradient get buckets of their own, behind those that are there, and what depends on all
buckets (reducer, residence, hooks) is made anew around the old ones.  No weight, master or state of the others moves.
All ranks have to do it together, and say first what they have found (rollcall.py).

A parameter may only go where an optimizer wants it: to the parameter group that held it when the module was
partitioned, or to one that was added since with `optimizer.add_param_group`.

Rejected.  Room for everything that might be unfrozen one day (with adapters, that is masters and states of the whole
model for nothing); closing the partition and making another (at stage 3 the whole model would have to be in memory).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import torch
from torch.nn import Parameter

import zcomm
from zpartition import shapes
from zpartition._compat import any_requires_grad
from zpartition.admission import claim
from zpartition.layout import Layout
from zpartition.layouts import plan_added
from zpartition.reducer import GradientReducer
from zpartition.residence import Residence
from zpartition.sharded import ShardedStorage, make_storage
from zpartition.state import Holder, block_numel
from zpartition.storage import BucketStorage
from zpartition.watch import Watch

if TYPE_CHECKING:
    from zpartition.partition import Partition

__all__ = ["admit", "dormant_groups", "refuse", "unfrozen"]


def unfrozen(partition: Partition) -> list[str]:
    """Names of the parameters that were frozen and require a gradient now."""
    if not any_requires_grad(*partition.at_rest.values()):  # asked at every forward: no loop in Python
        return []
    return [name for name, param in partition.at_rest.items() if param.requires_grad]


def refuse(partition: Partition) -> None:
    """ValueError if there are such: nobody would update them."""
    for name in unfrozen(partition):
        raise ValueError(
            f"parameter {name} requires a gradient, but was frozen when the module was partitioned, so nothing "
            "updates it. Freeze it again, or call the partition's admit_unfrozen() on all ranks before the forward "
            "pass of a step (a zengine engine does so by itself for what is unfrozen between two steps)."
        )


def dormant_groups(partition: Partition, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The parameter groups that hold parameters which are frozen, by name."""
    names = {id(param): name for name, param in partition.at_rest.items()}
    groups = enumerate(optimizer.param_groups)
    return {names[id(p)]: index for index, group in groups for p in group["params"] if id(p) in names}


def admit(partition: Partition) -> tuple[str, ...]:
    """Train what has been unfrozen from now on; returns the names.  See `Partition.admit_unfrozen`."""
    names = unfrozen(partition)
    if names:
        _refuse_half_way(partition, names)
    partition.roll.tell(names)
    if names or partition.residence.units:
        partition.roll.hear()
    if not names:
        return ()
    groups = _groups(partition, names)
    partition.ahead.close()
    everything = dict(partition.module.named_parameters())
    thawed = [s for s in partition.frozen if any(slot.name in groups for slot in s.bucket.slots)]
    _take_apart(partition, thawed)
    size = partition.layout.world_size
    blocks = block_numel(partition.optimizer)
    added = plan_added(partition.module, groups, partition.policy, size, len(partition.layout.buckets), blocks)
    rest = {slot.name: 0 for storage in thawed for slot in storage.bucket.slots if slot.name not in groups}
    resting = plan_added(partition.module, rest, partition.policy, size, len(partition.frozen))
    partition.tiers.extend(added)
    ranks = partition.ranks
    new = [partition.tiers.adopt(make_storage(b, everything, partition.policy, ranks)) for b in added.buckets]
    kept = [storage for storage in partition.frozen if storage not in thawed]
    remade = [
        partition.tiers.shelve(ShardedStorage.of(b, everything, partition.policy, ranks, False))
        for b in resting.buckets
    ]
    _fill(partition, [*new, *remade])
    partition.frozen = (*kept, *remade)
    partition.storages = (*partition.storages, *new)
    partition.holders = (*partition.holders, *(Holder(s.master, s.pieces(partition.rank), s.home) for s in new))
    partition.layout = attrs.evolve(partition.layout, buckets=(*partition.layout.buckets, *added.buckets))
    partition.params = {n: p for n, p in everything.items() if n in partition.params or n in groups}
    partition.at_rest = {name: param for name, param in partition.at_rest.items() if name not in groups}
    _rebuild(partition)
    if partition.optimizer is not None:
        _enlarge(partition, partition.optimizer, added, groups)
    return tuple(names)


def _refuse_half_way(partition: Partition, names: Sequence[str]) -> None:
    """ValueError in the middle of anything."""
    partition.refuse_parked()
    partition.watch.sweep()
    is_running = bool(partition.watch.running.open or partition.watch.blocks)
    if is_running or any(gradient.seen or gradient.kept is not None for gradient in partition.reducer.gradients):
        where = "inside of a forward pass or of a gathered() block" if is_running else "in the middle of a step"
        raise ValueError(
            f"parameter {names[0]} was unfrozen {where} ({len(names)} in all). Unfreeze between two steps: after the "
            "optimizer's step (or zero_grad), before the next forward pass."
        )


def _groups(partition: Partition, names: Sequence[str]) -> dict[str, int]:
    """The parameter group of each; ValueError for one that is in none."""
    if partition.optimizer is None:
        return dict.fromkeys(names, 0)
    known = {**partition.dormant, **dormant_groups(partition, partition.optimizer)}
    for name in names:
        if name not in known:
            raise ValueError(
                f"parameter {name} requires a gradient, but is in no parameter group of the optimizer. Give it to "
                'one, optimizer.add_param_group({"params": [...]}), before the next forward pass; or make the '
                "optimizer with all parameters, frozen ones as well: they cost nothing until they are unfrozen."
            )
    return {name: known[name] for name in names}


def _take_apart(partition: Partition, storages: Sequence[ShardedStorage]) -> None:
    """Give the parameters of these frozen weights, whole on every rank, memory of their own."""
    units = {storage.bucket.unit or "": partition.residence.units[storage.bucket.unit or ""] for storage in storages}
    values: list[tuple[Parameter, torch.Tensor]] = []
    partition.residence.release_all()
    for unit in units.values():
        partition.residence.use(unit, exact=True)
        values += [(p, p.data.clone()) for s in storages if s in unit.storages for p in s.params]
        partition.residence.drop(unit)
    for param, value in values:
        param.data = value


def _fill(partition: Partition, storages: Sequence[BucketStorage | ShardedStorage]) -> None:
    """Take the weights over, rank 0's values counting."""
    for storage in storages:
        holders = partition.ranks.having(storage.bucket).world
        if isinstance(storage, ShardedStorage):
            storage.take(holders)
        else:
            zcomm.broadcast(storage.flat, holders, source=0, label=f"weights[{storage.bucket.index}]")
            storage.refresh_master()


def _rebuild(partition: Partition) -> None:
    """Everything that looks at all buckets, around the storages that there are now."""
    old = partition.residence
    partition.watch.close()
    partition.reducer.close()
    old.stale()  # a backward of a forward from before has to be told
    policy, ranks, device = partition.policy, partition.ranks, partition.device
    units = [s for s in (*partition.storages, *partition.frozen) if isinstance(s, ShardedStorage)]
    partition.residence = Residence.of(units, policy, ranks, device)
    partition.residence.version = old.version
    partition.watch = Watch.install(partition.module, partition.residence)
    routes = ranks.twins() if units else ranks
    arrived = partition.residence.arrived
    lookout = partition.reducer.lookout
    partition.reducer = GradientReducer.create(partition.layout, policy, partition.params, routes, device, arrived)
    partition.reducer.lookout = lookout
    partition.tiers.attach(partition.reducer)
    partition.bystanders = attrs.evolve(partition.bystanders, partitioned=frozenset(map(id, partition.owned())))
    claim(partition, partition.owned(), [*partition.reducer.hooks, partition.watch])


def _enlarge(
    partition: Partition, optimizer: torch.optim.Optimizer, added: Layout, groups: Mapping[str, int]
) -> None:
    """Let the optimizer update the new shards as well."""
    if partition.updates_parameters:
        partition.holders = tuple(Holder.of_parameter(n, p) for n, p in partition.params.items())
    else:
        members = {id(partition.params[name]) for name in groups}
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if id(param) not in members]
        for bucket in added.buckets:
            optimizer.param_groups[bucket.group]["params"].append(partition.storages[bucket.index].master)
        if shapes.takes_cuts(optimizer):
            partition.tiers.step_all_at_once()
            masters = [storage.master for storage in partition.storages]
            shapes.lay_out(optimizer, masters, partition.layout, partition.ranks.shard, partition.device)
    partition.tiers.hook(optimizer, partition.storages)
    if partition.speculation is not None:
        partition.run_ahead(*partition.speculation)
