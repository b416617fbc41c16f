"""The experts of one layer: one module's parameters, stacked, of which each rank has a slice.

Problem.  Ranks hold different experts, but a partition, an optimizer and a checkpoint compare ranks parameter by
parameter.  A module for each expert has other names on other ranks, and as many small parameters as experts.

Design.  A parameter `w` of the expert becomes one parameter `stacked.w` with the experts in front; this rank's slice
of it is an Address like that of any split tensor (shard.py), so names are equal on all ranks and a checkpoint of any
number of expert ranks fits any other.  An `ExpertMLP` is computed by grouped products on the stacks.  Any other
module is called once for each expert that has tokens, with its slices in the place of its parameters.

Expert g is initialised with random numbers that depend on g alone, so a model is the same however it is split.

Rejected: a ModuleList of experts (see above); one parameter for all weights (optimizers and plans see shapes).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from zpartition.cells import ALONE, Cell
from zpartition.experts.grouped import add_rows_bias, runs
from zpartition.experts.mlp import ExpertMLP
from zpartition.experts.parameter import ExpertParameter
from zpartition.experts.seeding import drawn, seeded
from zpartition.shard import Address
from zpartition.tensor.entrance import Entrance
from zpartition.tensor.styles import cut_along
from zpartition.whole import part_of

__all__ = ["Experts"]


@final
class Experts(nn.Module):
    """`num_experts` copies of `expert`, of which this rank has those that `deal` gives it: `Dealt` (cells.py)."""

    def __init__(self, expert: nn.Module | Callable[[], nn.Module], num_experts: int, deal: Cell = ALONE) -> None:
        """expert: a module, whose weights are those of expert 0; the others are its copies, initialised anew by their
        own `reset_parameters`.  Or a callable that makes one, called for each under a seed of its own.

        Draws one number from torch's generator, however many experts there are here.  Raises ValueError for an expert
        with persistent buffers, for experts of different shapes, or if the experts do not divide.
        """
        super().__init__()
        refuse_uneven(num_experts, deal.size)
        self.num_experts, self.deal = num_experts, deal
        self.entrance = Entrance(ALONE)  # to tensor ranks
        self._addresses: dict[str, Address] = {}
        seed = drawn()
        first = _made(expert, self.own.start, seed)
        _refuse_buffers(first)
        self._template = (_on_meta(first),)  # in a tuple: no child of this module
        others = (_made(expert, index, seed) for index in self.own[1:])
        self.stacked = _stacked(first, others, len(self.own))
        self._note({})

    @property
    def own(self) -> range:
        """The numbers of this rank's experts."""
        share = self.num_experts // self.deal.size
        return range(self.deal.rank * share, (self.deal.rank + 1) * share)

    def addresses(self) -> Mapping[str, Address]:
        """Of the stacks, by their names here."""
        return self._addresses

    @property
    def cell(self) -> Cell:
        """The tensor ranks that have other parts of each expert."""
        return self.entrance.cell

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """What this rank's experts make of their rows.

        rows: (rows, hidden), sorted by expert; counts: rows of each.  Returns (rows, hidden).
        """
        (template,) = self._template
        weights = dict(self.stacked.named_parameters())
        if isinstance(template, ExpertMLP):
            return self._products(template, weights, rows, counts)
        template.train(self.training)
        buffers = dict(self.stacked.named_buffers())
        slices = {name: weight.unbind() for name, weight in weights.items()}
        outputs = [
            functional_call(template, {name: parts[index] for name, parts in slices.items()} | buffers, (rows[part],))
            for index, part in runs(counts)
        ]
        if not outputs:
            return with_graph_of(rows, weights.values())
        if isinstance(outputs[0], tuple):
            outputs = [output[0] for output in outputs]
        return torch.cat(outputs).to(rows.dtype)  # not what autocast made of them: a rank without rows cannot know

    def _products(
        self, template: ExpertMLP, weights: Mapping[str, Tensor], rows: Tensor, counts: Sequence[int]
    ) -> Tensor:
        if self.cell.size == 1:
            return template.forward_rows(weights, rows, counts)
        partial = {name: weight for name, weight in weights.items() if name != "down.bias"}
        y = self.entrance.leave(template.forward_rows(partial, self.entrance.enter(rows), counts))
        return y if "down.bias" not in weights else y + add_rows_bias(weights["down.bias"], counts)

    # -- sharing out -----------------------------------------------------------------------------

    def share_out(self, deal: Cell, tensor: Cell = ALONE) -> None:
        """Keep this rank's experts alone, of those that every rank has; and of each this tensor rank's part.

        Parameters keep their names and identities.  Raises ValueError as `check_parts`, before anything is changed.
        """
        self.check_parts(deal.size, tensor.size)
        (template,) = self._template
        dims = template.split_dims() if isinstance(template, ExpertMLP) and tensor.size > 1 else {}
        whole = dict(self.stacked.named_parameters())
        self.deal, self.entrance = deal, Entrance(tensor)
        self._note(dims)
        with torch.no_grad():
            for name, param in whole.items():
                param.grad = None
                param.data = part_of(param.data, self._addresses[f"stacked.{name}"])

    def check_parts(self, num_ranks: int, num_tensor: int) -> None:
        """Raise ValueError if these cannot be shared out among so many ranks, and each among tensor ranks.

        That is if they do not divide, were shared out before, or are split and the expert is no ExpertMLP.
        """
        if self.deal.size > 1 or self.cell.size > 1:
            raise ValueError("these experts are shared out already: a layer is told its ranks once.")
        refuse_uneven(self.num_experts, num_ranks)
        (template,) = self._template
        if num_tensor == 1:
            return
        if not isinstance(template, ExpertMLP):
            raise ValueError(
                f"expert tensor parallelism splits zpartition.experts.ExpertMLP, and the expert is a "
                f"{type(template).__name__}. Make the layer with an ExpertMLP, or without "
                "enable_expert_tensor_parallelism (tensor ranks then compute whole experts)."
            )
        if (inner := template.up.out_features) % num_tensor:
            raise ValueError(
                f"an inner size of {inner} does not divide by {num_tensor} tensor ranks. Make the experts with a "
                "multiple of that, or the layer without enable_expert_tensor_parallelism."
            )

    def _note(self, dims: Mapping[str, int]) -> None:
        """Write the addresses down, from the shapes of what there is; `dims`: of an expert's, over tensor ranks."""
        mine = (self.own.start, self.own.stop)
        for name, param in self.stacked.named_parameters():
            shape = (self.num_experts, *param.shape[1:])
            address = Address(shape, (((mine[0], mine[1]), *((0, size) for size in shape[1:])),))
            if name in dims:
                address = _cut_further(address, dims[name] + 1, self.cell)
            elif self.cell.size > 1:
                address = Address(shape, address.boxes, self.cell.size, self.cell.rank)
            self._addresses[f"stacked.{name}"] = address

    def extra_repr(self) -> str:
        """How many of how many."""
        return f"{self.own.start}-{self.own.stop - 1} of {self.num_experts} x {type(self._template[0]).__name__}"


def refuse_uneven(num_experts: int, num_ranks: int) -> None:
    """ValueError, with the numbers that do, if `num_ranks` do not divide the experts."""
    if num_experts < 1 or num_ranks < 1 or num_experts % num_ranks:
        divisors = ", ".join(str(number) for number in range(1, num_experts + 1) if num_experts % number == 0)
        raise ValueError(
            f"{num_experts} experts cannot be shared out evenly among {num_ranks} ranks: choose ep_size "
            f"(autoep_size) from {divisors}, or another number of experts."
        )


def _cut_further(address: Address, dim: int, cell: Cell) -> Address:
    """The part of the one box of `address` that this rank of `cell` has along `dim`."""
    size = address.global_shape[dim]
    share = size // cell.size
    inner = cut_along(address.global_shape, dim, size, (cell.rank * share, (cell.rank + 1) * share)).boxes[0]
    box = address.boxes[0]
    return Address(address.global_shape, (tuple(inner[at] if at == dim else side for at, side in enumerate(box)),))


def with_graph_of(rows: Tensor, weights: Iterable[Tensor]) -> Tensor:
    """`rows`, of which there are none, for experts that nobody came to.

    Ranks whose experts were wanted have a backward there, in which they exchange gradients with this rank: so it has
    one, too, even if what came does not require gradients itself.
    """
    return rows + sum(weight.reshape(-1)[:0].sum().to(rows.dtype) for weight in weights)


def _made(expert: nn.Module | Callable[[], nn.Module], index: int, seed: Tensor) -> nn.Module:
    """Expert `index`, in memory of its own but for the first."""
    with seeded(seed, index):
        if not isinstance(expert, nn.Module):
            return expert()
        if index:
            expert = copy.deepcopy(expert)
            for child in expert.modules():
                reset: Any = getattr(child, "reset_parameters", None)
                if reset is not None:
                    reset()
        return expert


def _refuse_buffers(expert: nn.Module) -> None:
    if found := set(expert.state_dict()) - {name for name, _ in expert.named_parameters(remove_duplicate=False)}:
        raise ValueError(
            f"the expert has persistent buffers ({', '.join(sorted(found))}), which its copies would share: keep "
            "state of an expert in parameters, or register constants with persistent=False."
        )


def _on_meta(expert: nn.Module) -> nn.Module:
    """The same module without values, to be called with those of others."""
    empty = copy.deepcopy(expert)
    return empty.to("meta")


def _stacked(first: nn.Module, others: Iterable[nn.Module], num_experts: int) -> nn.Module:
    """A tree of plain modules with the parameters of all, stacked, by the names that they have in one.

    Plain, so that nothing that looks for linear layers takes a stack for one.  One expert at a time is looked at.
    Raises ValueError for experts that differ in more than their numbers.
    """
    root = nn.Module()
    tensors: Iterator[tuple[str, Tensor]] = first.named_parameters()
    for name, param in tensors:
        values = torch.empty((num_experts, *param.shape), dtype=param.dtype, device=param.device)
        parent, leaf = _parent(root, name)
        parent.register_parameter(leaf, ExpertParameter(values, requires_grad=param.requires_grad))
    for name, buffer in first.named_buffers():
        parent, leaf = _parent(root, name)
        parent.register_buffer(leaf, buffer, persistent=False)
    with torch.no_grad():
        for index, module in enumerate(itertools.chain([first], others)):
            _refuse_unlike(first, module)
            for name, stack in root.named_parameters():
                stack[index].copy_(module.get_parameter(name))
    return root


def _refuse_unlike(first: nn.Module, other: nn.Module) -> None:
    shapes, others = ({name: list(param.shape) for name, param in each.named_parameters()} for each in (first, other))
    if shapes != others:
        raise ValueError(
            f"the experts of a layer must be alike: one has the parameters {others}, the first here {shapes}. Give "
            "an expert, or a callable that makes the same each time."
        )


def _parent(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    *path, leaf = name.split(".")
    for part in path:
        if part not in dict(root.named_children()):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root, leaf
