"""Full weights of stage 3, for reading and editing.

    with zpartition.gathered(model.embed):                    # read
        print(model.embed.weight.norm())
    with zpartition.gathered(model.embed, modifier_rank=0):   # write
        if rank == 0:
            model.embed.weight[0] = 0.0

Both are collectives: every rank enters.  Without `modifier_rank` all ranks must write the same values (an average of
two models, say), bit for bit; other edits are rejected when the block ends.  At stages 0 to 2, where weights are not
sharded, this is not checked.  Weights that were not written keep the full precision of their masters.

Blocks may be nested, and may end in any order.  A block without `modifier_rank` leaves units of an enclosing block
to that block; a block with `modifier_rank` first adopts earlier edits of enclosing blocks, so each block has its own
edits.  Blocks work at every stage: where weights are not sharded, `modifier_rank` makes ranks and masters agree.  A
view of a weight that outlives its block keeps its values.

`module.state_dict()` and `module.load_state_dict()` gather by themselves, one module at a time; they are collectives,
too, and rank 0's values are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

import zcomm
from zpartition.core import PartitionState
from zpartition.deferred.init import suspend_init
from zpartition.deferred.materialize import early_weights
from zpartition.memory.placement import same_bits
from zpartition.ownership import acquirer_of, owner_of
from zpartition.weights.hooks import GatheredBlock
from zpartition.weights.sharded import ShardedStorage
from zpartition.weights.unshard import Unit

__all__ = ["gathered", "is_gathered"]


@contextmanager
def gathered(
    what: nn.Module | Parameter | Iterable[Parameter], *, modifier_rank: int | None = None
) -> Iterator[None]:
    """Unshard the parameters of `what` inside the block; every rank must enter it.

    modifier_rank: rank (within the partition's group) whose edits are adopted; None: edits must be equal on all
        ranks.  Its expert-parallel peers each edit their own experts.

    For a module that was built inside `Init` and is not partitioned yet, see materialize.py.  Raises ValueError on
    every rank, with weights unchanged, for edits that differ between ranks.

    >>> import torch, zpartition
    >>> model = torch.nn.Linear(4, 2)
    >>> partition = zpartition.shard(model, policy=zpartition.ZeroPolicy(stage=3))
    >>> with zpartition.gathered(model, modifier_rank=0):
    ...     _ = model.weight.data.zero_()
    >>> bool(zpartition.safe_get_full_fp32_param(model.weight).any())
    False
    """
    params = _parameters(what)
    partitions = {id(owner): owner for param in params if (owner := owner_of(param)) is not None}
    with ExitStack() as stack:
        stack.enter_context(early_weights(params, modifier_rank))
        if partitions:
            stack.enter_context(suspend_init())
        opened = [(p, _open_block(p, params, modifier_rank)) for p in partitions.values()]
        for partition, block in opened:
            partition.check_weights_resident() if modifier_rank is None else partition.check_resident()
            partition.unshard_hooks.drop_finished()
            if modifier_rank is not None:
                partition.updates.finish()  # edits are what differs from the masters
            stack.enter_context(partition.unsharder.keep_unsharded(block.units))
            if modifier_rank is not None:
                _adopt_pending(partition, block)
            stack.callback(partition.unshard_hooks.blocks.remove, block)
            partition.unshard_hooks.blocks.append(block)
            if block.units:
                stack.enter_context(partition.unshard_hooks.saving())
        try:
            yield
        except BaseException:
            for partition, block in opened:
                for unit in block.units if modifier_rank is not None else _unshared(partition, block):
                    partition.unsharder.drop(unit)  # discards edits that were not adopted
            raise
        for partition, block in opened:
            _check_held(block)
            if modifier_rank is None:
                _adopt_agreed(partition, _unshared(partition, block), block.before)
            else:
                _adopt_edits(partition, block.units, params, modifier_rank)


def is_gathered(param: Parameter) -> bool:
    """Return whether an open `gathered` block, or a running module, holds `param`; False if it is not partitioned.

    Weights that are not sharded count as gathered only inside a block that holds them.
    """
    partition = acquirer_of(param)
    if partition is None:
        return False
    unit = partition.unshard_hooks.unit_of.get(id(param))
    if unit is not None:
        return unit.is_used
    return any(param is other for block in partition.unshard_hooks.blocks for other in block.params)


def _open_block(partition: PartitionState, params: list[Parameter], modifier_rank: int | None) -> GatheredBlock:
    """Open a block; copies unsharded weights, which no gather restores, to detect edits without a modifier_rank."""
    checks = modifier_rank is None and partition.policy.shards_weights
    others = {id(param) for block in partition.unshard_hooks.blocks for param in block.params}
    mine = {id(param) for param in params} - others if checks else set()
    whole = [param for storage in partition.whole for param in storage.params if id(param) in mine]
    return GatheredBlock(
        partition.unshard_hooks.units_of(params), params, modifier_rank, [(p, p.detach().clone()) for p in whole]
    )


def _unshared(partition: PartitionState, block: GatheredBlock) -> list[Unit]:
    """Return the units that no other block holds."""
    around = {id(unit) for other in partition.unshard_hooks.blocks if other is not block for unit in other.units}
    return [unit for unit in block.units if id(unit) not in around]


def _adopt_pending(partition: PartitionState, block: GatheredBlock) -> None:
    """Adopt, or reject, earlier edits of the open blocks in the units that `block` is about to hold."""
    around = partition.unshard_hooks.blocks
    editors = [other for other in around if other.modifier_rank is not None]
    edited = {id(unit) for other in editors for unit in other.units}
    wanted, mine = set(map(id, block.params)), set(map(id, block.units))
    for other in editors:
        assert other.modifier_rank is not None
        units = [unit for unit in other.units if id(unit) in mine]
        params = [param for param in other.params if id(param) in wanted]
        _adopt_edits(partition, units, params, other.modifier_rank)
    checked = {id(unit): unit for other in around for unit in other.units if id(unit) in mine - edited}
    if checked:
        _adopt_agreed(partition, list(checked.values()), [])


def _check_held(block: GatheredBlock) -> None:
    for unit in block.units:
        if unit.is_sharded:
            raise ValueError(
                f"the weights of unit {unit.name!r} were released, because another gathered(...) inside this block "
                "raised; later edits here are lost. Let the exception leave this block too, or enter it again."
            )


def _adopt_edits(partition: PartitionState, units: list[Unit], params: list[Parameter], source: int) -> None:
    for unit in units:
        partition.unsharder.broadcast_edits(unit, source, ShardedStorage.adopt_edits)
    wanted = {id(param) for param in params}
    for storage in partition.whole:
        if any(id(param) in wanted for param in storage.params):
            holders = partition.ranks.groups_for(storage.bucket).world
            zcomm.broadcast(storage.flat, holders, source=source // storage.bucket.num_expert_shards, label="edits")
            storage.adopt_edits()
    partition.unsharder.version += 1  # a graph made before must not see the edits


def _adopt_agreed(partition: PartitionState, units: list[Unit], before: list[tuple[Parameter, Tensor]]) -> None:
    """Adopt edits that all ranks made alike without a modifier_rank; undo others and raise ValueError."""
    storages = [(unit.name, storage) for unit in units for storage in unit.storages]
    groups_for = partition.ranks.groups_for
    found = [(name, storage.is_edited(groups_for(storage.bucket).shard)) for name, storage in storages]
    edited = sorted({f"unit {name!r}" for name, is_edited in found if is_edited})
    changed = {id(param) for param, was in before if not bool(same_bits(param.detach(), was).all())}
    checked = {id(param) for param, _ in before}
    whole = [storage for storage in partition.whole if any(id(param) in checked for param in storage.params)]
    if not _any_rank(partition, bool(edited or changed)):
        return
    shown = [(storage.full, storage) for _, storage in storages] + [(storage.flat, storage) for storage in whole]
    differ = [_differs(flat, storage.bucket.numel, groups_for(storage.bucket).world) for flat, storage in shown]
    if not _any_rank(partition, any(differ)):
        for _, storage in shown:
            storage.adopt_edits()
        partition.unsharder.version += 1  # a graph made before must not see the edits
        return
    for unit in units:
        partition.unsharder.regather(unit)
    for param, was in before:
        param.data.copy_(was)
    where = f" ({', '.join(edited)})" if edited else ""
    raise ValueError(
        f"parameters edited inside gathered(...){where} differ between ranks; without modifier_rank edits must be "
        "equal on all ranks, so they are undone. Pass modifier_rank=0 and edit on that rank."
    )


def _differs(flat: Tensor | None, numel: int, group: ProcessGroup | None) -> bool:
    """Return whether the bits of `flat` differ from those of the group's first rank.  A collective."""
    assert flat is not None
    first = flat[:numel].clone()
    zcomm.broadcast(first, group, source=0, label="edits")
    return not bool(same_bits(first, flat[:numel]).all())


def _any_rank(partition: PartitionState, here: bool) -> bool:
    found = torch.tensor(float(here), device=partition.device)
    zcomm.all_reduce(found, partition.group, op="max", label="edits")
    return bool(found.item())


def _parameters(what: nn.Module | Parameter | Iterable[Parameter]) -> list[Parameter]:
    if isinstance(what, nn.Module):
        return list(what.parameters())
    return [what] if isinstance(what, Parameter) else list(what)
