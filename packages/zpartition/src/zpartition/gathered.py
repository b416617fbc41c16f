"""Whole weights for people at stage 3: state dicts, and editing.

    with zpartition.gathered(model.embed):                    # read
        print(model.embed.weight.norm())
    with zpartition.gathered(model.embed, modifier_rank=0):   # write
        if rank == 0:
            model.embed.weight[0] = 0.0

Both are collectives: every rank comes along.  What was written without `modifier_rank` is refused when the block
ends, because the ranks would disagree about it (where weights are whole anyway, nobody looks).  Blocks may be nested:
one without `modifier_rank` leaves what a block around it holds to that one.  They work at every stage: where weights
are whole, `modifier_rank` makes the ranks and the masters agree.

`module.state_dict()` and `module.load_state_dict()` gather by themselves, one module at a time; they are collectives
too, and what is loaded on rank 0 counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

import zcomm
from zpartition.admission import owner_of
from zpartition.calls import Calls, Hook
from zpartition.residence import Residence, Unit

if TYPE_CHECKING:
    from zpartition.partition import Partition

__all__ = ["gathered", "hook_state"]


@contextmanager
def gathered(
    what: nn.Module | Parameter | Iterable[Parameter], *, modifier_rank: int | None = None
) -> Iterator[None]:
    """The parameters of `what` whole inside the block; every rank must enter it.

    modifier_rank: whose edits count (within the partition's group); None refuses edits.
    Raises ValueError on every rank, leaving the weights as they were, for edits that nobody may make.
    """
    params = _parameters(what)
    partitions = {id(owner): owner for param in params if (owner := owner_of(param)) is not None}
    with ExitStack() as stack:
        chosen = [(partition, partition.watch.units_of(params)) for partition in partitions.values()]
        for partition, units in chosen:
            partition.refuse_without_weights() if modifier_rank is None else partition.refuse_parked()
            partition.watch.sweep()
            stack.enter_context(partition.residence.held(units))
            stack.callback(partition.watch.blocks.pop)
            partition.watch.blocks.append(units)
            if units:
                stack.enter_context(partition.watch.saving())
        try:
            yield
        except BaseException:
            for partition, units in chosen:
                for unit in units:
                    partition.residence.drop(unit)  # edits that nobody has taken
            raise
        for partition, units in chosen:
            if modifier_rank is None:
                around = {id(unit) for block in partition.watch.blocks[:-1] for unit in block}  # they will answer
                _refuse_edits(partition, [unit for unit in units if id(unit) not in around])
            else:
                _take_edits(partition, units, params, modifier_rank)


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
        zcomm.broadcast(whole, residence.ranks.world, source=source, label=f"edits of unit {unit.name!r}")
        storage.absorb()


def _take_edits(partition: Partition, units: list[Unit], params: list[Parameter], source: int) -> None:
    for unit in units:
        _spread(unit, partition.residence, source=source)
    wanted = {id(param) for param in params}
    for storage in partition.whole:
        if any(id(param) in wanted for param in storage.params):
            zcomm.broadcast(storage.flat, partition.group, source=source, label="edits")
            storage.refresh_master()
    partition.residence.version += 1  # a graph made before must not see the edits


def _refuse_edits(partition: Partition, units: list[Unit]) -> None:
    looks = [(unit.name, storage.is_edited(partition.ranks.shard)) for unit in units for storage in unit.storages]
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
