"""Whole weights for people at stage 3: state dicts, and editing.

    with zpartition.gathered(model.embed):                    # read
        print(model.embed.weight.norm())
    with zpartition.gathered(model.embed, modifier_rank=0):   # write
        if rank == 0:
            model.embed.weight[0] = 0.0

Both are collectives: every rank comes along.  Without `modifier_rank` all ranks have to write the same (an average of
two models, say), bit for bit: anything else is refused when the block ends, because nobody knows whose edits count.
At stages 0 to 2, where weights are whole anyway, nobody looks.  What was not written keeps its master, with all the
digits that the weight lacks.

Blocks may be nested, and may end in any order: one without `modifier_rank` leaves what a block around it holds to
that one; one with it begins by settling what was written around it so far, and so each block has edits of its own.
They work at every stage: where weights are whole, `modifier_rank` makes the ranks and the masters agree.  A view that
somebody keeps of a weight goes on showing what it was when the block ended.

`module.state_dict()` and `module.load_state_dict()` gather by themselves, one module at a time; they are collectives
too, and what is loaded on rank 0 counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, final

import attrs
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

import zcomm
from zpartition.admission import claimant_of, owner_of
from zpartition.calls import Calls, Hook
from zpartition.homes import same_bits
from zpartition.residence import Residence, Unit
from zpartition.settled import early_weights
from zpartition.sharded import ShardedStorage

if TYPE_CHECKING:
    from zpartition.partition import Partition

__all__ = ["Block", "gathered", "hook_state", "is_gathered"]


@final
@attrs.frozen(eq=False)
class Block:
    """One `gathered(...)` that is open."""

    units: list[Unit]  # that it holds
    params: list[Parameter]
    modifier_rank: int | None  # whose edits count; None: those that all make
    before: list[tuple[Parameter, Tensor]]  # parameters that are whole in any case, and what they were, if it is None

    @classmethod
    def of(cls, partition: Partition, params: list[Parameter], modifier_rank: int | None) -> Block:
        """Copies what the block will have to answer for and no gather brings again."""
        looks = modifier_rank is None and partition.policy.shards_weights
        others = {id(param) for block in partition.watch.blocks for param in block.params}
        mine = {id(param) for param in params} - others if looks else set()
        whole = [param for storage in partition.whole for param in storage.params if id(param) in mine]
        return cls(partition.watch.units_of(params), params, modifier_rank, [(p, p.detach().clone()) for p in whole])


@contextmanager
def gathered(
    what: nn.Module | Parameter | Iterable[Parameter], *, modifier_rank: int | None = None
) -> Iterator[None]:
    """The parameters of `what` whole inside the block; every rank must enter it.

    modifier_rank: whose edits count (within the partition's group); None: those that all ranks make alike.  Of
        experts, those of the ranks that share them out with it: each shows its own.
    Of a module that was built inside `Init` and is not partitioned yet: see settled.py.
    Raises ValueError on every rank, leaving the weights as they were, for edits that ranks do not agree about.
    """
    params = _parameters(what)
    partitions = {id(owner): owner for param in params if (owner := owner_of(param)) is not None}
    with ExitStack() as stack:
        stack.enter_context(early_weights(params, modifier_rank))
        opened = [(p, Block.of(p, params, modifier_rank)) for p in partitions.values()]
        for partition, block in opened:
            partition.refuse_without_weights() if modifier_rank is None else partition.refuse_parked()
            partition.watch.sweep()
            stack.enter_context(partition.residence.held(block.units))
            if modifier_rank is not None:
                _settle(partition, block)
            stack.callback(partition.watch.blocks.remove, block)
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
                _take_agreed(partition, _unshared(partition, block), block.before)
            else:
                _take_edits(partition, block.units, params, modifier_rank)


def is_gathered(param: Parameter) -> bool:
    """Whether a block of `gathered` holds `param`, or a module runs that needs it; False between, and of nobody's.

    Weights that are whole in any case are not gathered unless a block holds them.
    """
    partition = claimant_of(param)
    if partition is None:
        return False
    unit = partition.watch.unit_of.get(id(param))
    if unit is not None:
        return unit.is_used
    return any(param is other for block in partition.watch.blocks for other in block.params)


def _unshared(partition: Partition, block: Block) -> list[Unit]:
    """What no other block holds; they answer for the rest."""
    around = {id(unit) for other in partition.watch.blocks if other is not block for unit in other.units}
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
        _take_agreed(partition, list(looked_at.values()), [])


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
                _spread(unit, dicts.residence, 0, ShardedStorage.absorb)
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


def _spread(unit: Unit, residence: Residence, source: int, take: Callable[[ShardedStorage], None]) -> None:
    """What rank `source` shows of a whole unit becomes the truth on all ranks; `take` makes it that of one."""
    for storage in unit.storages:
        assert storage.full is not None
        whole = storage.full[: storage.bucket.numel]
        holders = residence.ranks.having(storage.bucket).world
        zcomm.broadcast(whole, holders, source=source // storage.bucket.deal, label=f"edits of unit {unit.name!r}")
        take(storage)


def _take_edits(partition: Partition, units: list[Unit], params: list[Parameter], source: int) -> None:
    for unit in units:
        _spread(unit, partition.residence, source, ShardedStorage.absorb_edits)
    wanted = {id(param) for param in params}
    for storage in partition.whole:
        if any(id(param) in wanted for param in storage.params):
            holders = partition.ranks.having(storage.bucket).world
            zcomm.broadcast(storage.flat, holders, source=source // storage.bucket.deal, label="edits")
            storage.absorb_edits()
    partition.residence.version += 1  # a graph made before must not see the edits


def _take_agreed(partition: Partition, units: list[Unit], before: list[tuple[Parameter, Tensor]]) -> None:
    """What was written without a modifier_rank: taken if all ranks have written the same, else undone and refused."""
    storages = [(unit.name, storage) for unit in units for storage in unit.storages]
    having = partition.ranks.having
    looks = [(name, storage.is_edited(having(storage.bucket).shard)) for name, storage in storages]
    edited = sorted({f"unit {name!r}" for name, is_edited in looks if is_edited})
    changed = {id(param) for param, was in before if not bool(same_bits(param.detach(), was).all())}
    looked_at = {id(param) for param, _ in before}
    whole = [storage for storage in partition.whole if any(id(param) in looked_at for param in storage.params)]
    if not _any_rank(partition, bool(edited or changed)):
        return
    shown = [(storage.full, storage) for _, storage in storages] + [(storage.flat, storage) for storage in whole]
    differ = [_differs(flat, storage.bucket.numel, having(storage.bucket).world) for flat, storage in shown]
    if not _any_rank(partition, any(differ)):
        for _, storage in shown:
            storage.absorb_edits()
        partition.residence.version += 1  # a graph made before must not see the edits
        return
    for unit in units:
        partition.residence.forget(unit)
    for param, was in before:
        param.data.copy_(was)
    where = f" ({', '.join(edited)})" if edited else ""
    raise ValueError(
        f"parameters were edited inside gathered(...){where}, differently on the ranks, and without modifier_rank "
        "nobody knows whose edits count; they are undone. Pass modifier_rank=0 and edit on that rank."
    )


def _differs(flat: Tensor | None, numel: int, group: ProcessGroup | None) -> bool:
    """Whether this rank shows other bits than the first of the group."""
    assert flat is not None
    first = flat[:numel].clone()
    zcomm.broadcast(first, group, source=0, label="edits")
    return not bool(same_bits(first, flat[:numel]).all())


def _any_rank(partition: Partition, here: bool) -> bool:
    found = torch.tensor(float(here), device=partition.device)
    zcomm.all_reduce(found, partition.group, op="max", label="edits")
    return bool(found.item())


def _parameters(what: nn.Module | Parameter | Iterable[Parameter]) -> list[Parameter]:
    if isinstance(what, nn.Module):
        return list(what.parameters())
    return [what] if isinstance(what, Parameter) else list(what)
