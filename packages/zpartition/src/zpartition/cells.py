"""What cells of a model there are beside the ranks of a partition, and which part of each tensor this one has.

A tensor-parallel module holds a part of its weights; the ranks with the other parts see the same data.  They are the
*cell group* of this rank.  A partition works inside one cell, over the ranks that hold the same parts: it sees small
parameters, and needs to know three things of the outside, which modules tell it themselves (`Celled`): where each
parameter lies in the global tensor (for checkpoints), which are copies (their gradients count once in a norm), and
over whom such sums go.

Experts are another matter (`Dealt`): the ranks that share them out see different data, and are ranks of one and the
same partition.  To that, a dealt parameter is one that only some of its ranks hold: those sum its gradient.

A pipeline (`Staged`) cuts a model between its tensors: other ranks have other names, and sums go over them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, final, runtime_checkable

import attrs
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import zcomm
from zpartition.shard import Address

__all__ = [
    "ALONE",
    "Cell",
    "Celled",
    "Dealt",
    "Staged",
    "addresses_of",
    "cell_of",
    "deals_of",
    "refuse_misdealt",
    "refuse_mixed",
    "replicas_of",
    "stages_of",
]


@final
@attrs.frozen(eq=False)
class Cell:
    """This rank's place among those that hold the parts of the same tensors."""

    group: ProcessGroup | None  # only looked at where `size` > 1
    size: int = 1
    rank: int = 0

    @classmethod
    def of(cls, group: ProcessGroup | None) -> Cell:
        """The ranks of `group` are the cells."""
        return cls(group, zcomm.group_size(group), zcomm.group_rank(group))

    def add_up(self, sums: Tensor) -> None:
        """Sum `sums`, which are over this cell, over all cells, in place."""
        if self.size > 1:
            zcomm.all_reduce(sums, self.group, label="sums over cells")

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Cell:
        """Itself: a copy of a module communicates over the same group."""
        return self


ALONE = Cell(None)  # every tensor is whole


@runtime_checkable
class Celled(Protocol):
    """A module with parameters that are parts of tensors."""

    cell: Cell

    def addresses(self) -> Mapping[str, Address]:
        """Of its own parameters, by their names in it."""


@runtime_checkable
class Dealt(Protocol):
    """A module of whose parameters ranks with different data have different parts: some of the experts."""

    deal: Cell  # those ranks: neighbours among the ranks of a partition
    cell: Cell  # tensor ranks that have other parts of each expert; ALONE where each of them has whole experts

    def addresses(self) -> Mapping[str, Address]:
        """Of what is dealt out, by names in it (with dots, for what its children hold)."""


def deals_of(module: nn.Module) -> dict[str, Cell]:
    """Of every dealt parameter of `module`, by name, the ranks that it is dealt out to (where those are several)."""
    found = {
        id(child.get_parameter(name)): child.deal
        for child in module.modules()
        if isinstance(child, Dealt) and child.deal.size > 1
        for name in child.addresses()
    }
    return {name: found[id(param)] for name, param in module.named_parameters() if id(param) in found}


@runtime_checkable
class Staged(Protocol):
    """A module that is some of the layers of a model."""

    def stage_cell(self) -> Cell:
        """The ranks with the other layers, first to last, this one among them.  A collective of those."""


def stages_of(module: nn.Module) -> Cell:
    """Over whom `module` is cut along its depth; ALONE for one that is whole."""
    return module.stage_cell() if isinstance(module, Staged) else ALONE


def cell_of(module: nn.Module) -> Cell:
    """The cell that the modules inside `module` name.  Raises ValueError if they name different ones."""
    celled = ((name, child.cell) for name, child in module.named_modules() if isinstance(child, Celled))
    found = {name: cell for name, cell in celled if cell is not ALONE}
    first = next(iter(found), "")
    for name, cell in found.items():
        if cell.group is not found[first].group:
            raise ValueError(
                f"modules {first} and {name} are split over different groups ({found[first].size} and {cell.size} "
                "ranks): a model is split over one group of tensor ranks, so make both over the same."
            )
    return found[first] if found else ALONE


def refuse_mixed(module: nn.Module, group: ProcessGroup | None) -> None:
    """ValueError if `group` has ranks that hold other parts of `module`: those cannot be one partition."""
    tensor, stages = cell_of(module), stages_of(module)
    mates = f"zcomm.run_mates({tensor.size}) for neighbours"
    for cell, kind, cure in ((tensor, "tensor", mates), (stages, "pipeline", "zpartition.replicas_of(module)")):
        others, mine = _ranks_of(cell), dist.get_rank() if cell.size > 1 else 0
        shared = sorted(set(dist.get_process_group_ranks(group)) & set(others) - {mine}) if others else []
        if shared:
            raise ValueError(
                f"the module is split over the {kind} ranks {others}, and the group to partition it over has rank "
                f"{mine} and also {', '.join(map(str, shared))} of them, which hold other parts. Give the "
                f"data-parallel group: group={cure}, or Groups.gradient()."
            )


def refuse_misdealt(module: nn.Module, group: ProcessGroup | None) -> None:
    """ValueError unless what is dealt out went to runs of neighbours of `group`: others would seem to hold it."""
    for name, deal in deals_of(module).items():
        ranks, everybody = dist.get_process_group_ranks(deal.group), dist.get_process_group_ranks(group)
        at = everybody.index(dist.get_rank()) // deal.size * deal.size
        if ranks != everybody[at : at + deal.size] or len(everybody) % deal.size:
            raise ValueError(
                f"{name} is dealt out to ranks {ranks}, which are no run of {deal.size} neighbours in the group to "
                f"partition over, {everybody}. Deal experts out over zcomm.run({deal.size}, group), or "
                "Groups.experts()."
            )


def replicas_of(module: nn.Module) -> ProcessGroup | None:
    """The ranks that hold the same parts as this one, to partition over; None, for all, where modules are whole.

    A collective of those ranks when it is first asked for.  Raises ValueError if tensor ranks are no neighbours.
    """
    cell, stages = cell_of(module), stages_of(module)
    if cell.size == stages.size == 1:
        return None
    ranks, rank, size = _ranks_of(cell), dist.get_rank(), dist.get_world_size()
    first = rank // cell.size * cell.size
    if ranks and (ranks != list(range(first, first + cell.size)) or size % cell.size):
        raise ValueError(
            f"the module is split over ranks {ranks} of {size}, which are no run of {cell.size} "
            "neighbours, so the ranks with the same parts cannot be told: name their group (mesh=, in zengine)."
        )
    return zcomm.Groups.of(zcomm.Degrees(pipeline=stages.size, tensor=cell.size)).gradient()


def _ranks_of(cell: Cell) -> list[int]:
    return dist.get_process_group_ranks(cell.group) if cell.size > 1 else []


def addresses_of(module: nn.Module) -> dict[str, Address]:
    """The address of every parameter of `module`, by name; what nobody tells is a copy of the whole in each cell."""
    cell = cell_of(module)
    told: dict[int, Address] = {}
    for child in module.modules():
        if isinstance(child, Celled | Dealt):
            for name, address in child.addresses().items():
                if child.cell is ALONE:  # whole experts on every tensor rank
                    address = attrs.evolve(address, num_copies=cell.size, copy=cell.rank)
                told[id(child.get_parameter(name))] = address
    return {
        name: told.get(id(param)) or Address.whole(param.shape, cell.size, cell.rank)
        for name, param in module.named_parameters()
    }
