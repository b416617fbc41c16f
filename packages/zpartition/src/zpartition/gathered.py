"""Whole weights for people at stage 3: state dicts, and editing.

    with zpartition.gathered(model.embed):                    # read
        print(model.embed.weight.norm())
    with zpartition.gathered(model.embed, modifier_rank=0):   # write
        if rank == 0:
            model.embed.weight[0] = 0.0

Both are collectives: every rank comes along.  What was written without `modifier_rank` is refused when the block
ends, because the ranks would disagree about it (where weights are whole anyway, nobody looks).  Blocks may be nested:
one without `modifier_rank` leaves what a block around it holds to that one; one with it begins by settling what was
written around it so far, and so each block has edits of its own.  They work at every stage: where weights are whole,
`modifier_rank` makes the ranks and the masters agree.

`module.state_dict()` and `module.load_state_dict()` gather by themselves, one module at a time; they are collectives
too, and what is loaded on rank 0 counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, final

import attrs
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import zcomm
from zpartition.admission import owner_of
from zpartition.calls import Calls, Hook
from zpartition.residence import Residence, Unit
from zpartition.settled import early_weights

if TYPE_CHECKING:
    from zpartition.partition import Partition

__all__ = ["Block", "gathered", "hook_state"]


@final
@attrs.frozen(eq=False)
class Block:
    """One `gathered(...)` that is open."""

    units: list[Unit]  # that it holds
    params: list[Parameter]
    modifier_rank: int | None  # whose edits count


@contextmanager
def gathered(
    what: nn.Module | Parameter | Iterable[Parameter], *, modifier_rank: int | None = None
) -> Iterator[None]:
    """The parameters of `what` whole inside the block; every rank must enter it.

    modifier_rank: whose edits count (within the partition's group); None refuses edits.  Of experts, those of the
        ranks that share them out with it: each shows its own.
    Of a module that was built inside `Init` and is not partitioned yet: see settled.py.
    Raises ValueError on every rank, leaving the weights as they were, for edits that nobody may make.
    """
    params = _parameters(what)
    partitions = {id(owner): owner for param in params if (owner := owner_of(param)) is not None}
    with ExitStack() as stack:
        stack.enter_context(early_weights(params, modifier_rank))
        opened = [(p, Block(p.watch.units_of(params), params, modifier_rank)) for p in partitions.values()]
        for partition, block in opened:
            partition.refuse_without_weights() if modifier_rank is None else partition.refuse_parked()
            partition.watch.sweep()
            stack.enter_context(partition.residence.held(block.units))
            if modifier_rank is not None:
                _settle(partition, block)
            stack.callback(partition.watch.blocks.pop)
            partition.watch.blocks.append(block)
            if block.units:
                stack.enter_context(partition.watch.saving())
        try:
            yield
        except BaseException:
            for partition, block in opened:
                for unit in block.units if modifier_rank is not None else _unshared(partition, block):
                    partition.residence.drop(unit)  # edits that nobody has taken
            raise
        for partition, block in opened:
            _refuse_dropped(block)
            if modifier_rank is None:
                _refuse_edits(partition, _unshared(partition, block))
            else:
                _take_edits(partition, block.units, params, modifier_rank)


def _unshared(partition: Partition, block: Block) -> list[Unit]:
    """What no block around the innermost holds; they answer for the rest."""
    around = {id(unit) for other in partition.watch.blocks[:-1] for unit in other.units}
    return [unit for unit in block.units if id(unit) not in around]


def _settle(partition: Partition, block: Block) -> None:
    """Take, or refuse, what the open blocks have written so far into what `block` is about to hold."""
    around = partition.watch.blocks
    editors = [other for other in around if other.modifier_rank is not None]
    edited = {id(unit) for other in editors for unit in other.units}
    wanted, mine = set(map(id, block.params)), set(map(id, block.units))
    for other in editors:
        assert other.modifier_rank is not None
        units = [unit for unit in other.units if id(unit) in mine]
        params = [param for param in other.params if id(param) in wanted]
        _take_edits(partition, units, params, other.modifier_rank)
    looked_at = {id(unit): unit for other in around for unit in other.units if id(unit) in mine - edited}
    if looked_at:
        _refuse_edits(partition, list(looked_at.values()))


def _refuse_dropped(block: Block) -> None:
    for unit in block.units:
        if unit.is_resting:
            raise ValueError(
                f"the weights of unit {unit.name!r} are gone: something raised inside another gathered(...) in this "
                "block, and what was written here since is lost. Let the exception leave this block too, or enter it "
                "again."
            )


def hook_state(module: nn.Module, units: Mapping[str, Unit], dicts: Calls) -> list[Any]:
    """Let state dicts of `module` be whole; `units` by names of its own parameters.  Returns the hooks' handles."""
    distinct = list({id(unit): unit for unit in units.values()}.values())

    def begin(function: str) -> Hook:
        def hold(owner: nn.Module, *_: Any) -> None:
            if distinct and (partition := owner_of(distinct[0].storages[0].params[0])) is not None:
                partition.refuse_parked() if function == "load" else partition.refuse_without_weights()
            dicts.sweep()
            dicts.begin(owner, function, None, distinct)

        return Hook(hold)

    def saved(owner: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        found = {name: state[prefix + name] for name in units if prefix + name in state}
        live = [name for name, value in found.items() if isinstance(value, Parameter) and units[name].depth == 1]
        state.update({prefix + name: value.clone() for name, value in found.items() if _is_plain(value)})
        if dicts.innermost(owner) is not None:
            dicts.end()
        if live:
            raise ValueError(_KEPT.format(name=prefix + live[0]))

    def loaded(owner: nn.Module, _incompatible: Any) -> None:
        call = dicts.innermost(owner)
        for unit in call.units if call is not None else ():
            if unit.depth == 1:
                _spread(unit, dicts.residence, source=0)
                dicts.residence.version += 1  # a graph made before must not see what was loaded
        if call is not None:
            dicts.end()

    return [
        module.register_state_dict_pre_hook(begin("state_dict")),  # type: ignore[no-untyped-call]
        module.register_state_dict_post_hook(Hook(saved)),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(begin("load")),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(Hook(loaded)),  # type: ignore[no-untyped-call]
    ]


def _is_plain(value: object) -> bool:
    """Whether a state dict holds a view of a weight, which is about to leave."""
    return isinstance(value, Tensor) and not isinstance(value, Parameter)


_KEPT = (
    "state_dict(keep_vars=True) would hold parameter {name!r} itself, whose weights rest as shards and read as NaN. "
    "Leave keep_vars out, or call it inside zpartition.gathered(module) and use the result there."
)


def _spread(unit: Unit, residence: Residence, *, source: int) -> None:
    """What rank `source` shows of a whole unit becomes the truth on all ranks."""
    for storage in unit.storages:
        assert storage.full is not None
        whole = storage.full[: storage.bucket.numel]
        holders = residence.ranks.having(storage.bucket).world
        zcomm.broadcast(whole, holders, source=source // storage.bucket.deal, label=f"edits of unit {unit.name!r}")
        storage.absorb()


def _take_edits(partition: Partition, units: list[Unit], params: list[Parameter], source: int) -> None:
    for unit in units:
        _spread(unit, partition.residence, source=source)
    wanted = {id(param) for param in params}
    for storage in partition.whole:
        if any(id(param) in wanted for param in storage.params):
            holders = partition.ranks.having(storage.bucket).world
            zcomm.broadcast(storage.flat, holders, source=source // storage.bucket.deal, label="edits")
            storage.refresh_master()
    partition.residence.version += 1  # a graph made before must not see the edits


def _refuse_edits(partition: Partition, units: list[Unit]) -> None:
    storages = [(unit.name, storage) for unit in units for storage in unit.storages]
    looks = [(name, storage.is_edited(partition.ranks.having(storage.bucket).shard)) for name, storage in storages]
    edited = sorted({name for name, is_edited in looks if is_edited})
    found = torch.tensor(float(bool(edited)), device=partition.device)
    zcomm.all_reduce(found, partition.group, op="max", label="edits")
    if found.item():
        for unit in units:
            partition.residence.forget(unit)
        where = f" (unit {', '.join(map(repr, edited))})" if edited else ""
        raise ValueError(
            f"parameters were edited inside gathered(...){where}, and without modifier_rank nobody knows whose edits "
            "count; they are undone. Pass modifier_rank=0 and edit on that rank."
        )


def _parameters(what: nn.Module | Parameter | Iterable[Parameter]) -> list[Parameter]:
    if isinstance(what, nn.Module):
        return list(what.parameters())
    return [what] if isinstance(what, Parameter) else list(what)
