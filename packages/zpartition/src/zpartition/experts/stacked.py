"""Stacked experts: the parameters of all experts of a layer, stacked, of which each rank holds a slice.

Problem.  Ranks hold different experts, but a partition, an optimizer and a checkpoint compare ranks parameter by
parameter.  One module for each expert has other names on other ranks, and as many small parameters as experts.

Design.  A parameter `w` of the expert becomes one parameter `stacked.w` with the experts in front; this rank's slice
is an Address like that of any split tensor (layout/address.py), so names are equal on all ranks and a checkpoint of
any number of expert ranks fits any other.  An `ExpertMLP` is computed by grouped products on the stacks.  Any other
module is called once for each expert that has tokens, with its slices as parameters.

Expert g is initialized with random numbers that depend on g alone, so a model is the same however it is sharded: each
expert has its own seed, derived from one number of torch's generator.  Inside `Init` there are no numbers while a
module is built; there the seeding is recorded between the steps that fill the expert.

Rejected: a ModuleList of experts (see above); one parameter for all weights (optimizers and plans look at shapes).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import Parameter

from zpartition.deferred.init import active_recording
from zpartition.deferred.recording import is_meta
from zpartition.experts.mlp import ExpertMLP, add_rows_bias, runs
from zpartition.layout.address import Address
from zpartition.layout.model_parallel import ALONE, ModelParallelGroup
from zpartition.tensor.parallel_region import ParallelRegion
from zpartition.tensor.styles import split_along
from zpartition.tensors.whole import part_of

__all__ = ["ExpertParameter", "Experts", "mark_experts"]


class ExpertParameter(Parameter):
    """A parameter that holds the weights of several experts, with the experts in front."""


def mark_experts(param: Parameter) -> None:
    """Make `param` an ExpertParameter in place; other subclasses (such as quantized parameters) keep their class.

    A class that only adds names to a parameter (zengine.deepspeed's marks) declares its base as `stands_for`.
    """
    if getattr(type(param), "stands_for", type(param)) is Parameter:
        untyped: Any = param
        untyped.__class__ = ExpertParameter


@final
class Experts(nn.Module):
    """`num_experts` copies of `expert`, of which this rank of `expert_group` holds a slice.

    An `ExpertShardedModule` (layout/model_parallel.py).
    """

    def __init__(
        self, expert: nn.Module | Callable[[], nn.Module], num_experts: int, expert_group: ModelParallelGroup = ALONE
    ) -> None:
        """Build this rank's stacks.

        expert: a module, whose weights are those of expert 0; the others are copies, reinitialized by their own
            `reset_parameters`.  Or a callable that builds one, called for each expert under its own seed.

        Draws one number from torch's generator, for any number of local experts.  Raises ValueError for an expert
        with persistent buffers, for experts of different shapes, or if the experts do not divide.
        """
        super().__init__()
        check_divisible(num_experts, expert_group.size)
        self.num_experts, self.expert_group = num_experts, expert_group
        self.parallel_region = ParallelRegion(ALONE)  # to tensor ranks
        self._addresses: dict[str, Address] = {}
        seed = draw_seed()
        first = _build_expert(expert, self.own.start, seed)
        _check_no_buffers(first)
        self._template = (_copy_to_meta(first),)  # in a tuple: no child of this module
        others = (_build_expert(expert, index, seed) for index in self.own[1:])
        self.stacked = _stack_parameters(first, others, len(self.own))
        self._set_addresses({})

    @property
    def own(self) -> range:
        """Numbers of this rank's experts."""
        share = self.num_experts // self.expert_group.size
        return range(self.expert_group.rank * share, (self.expert_group.rank + 1) * share)

    def addresses(self) -> Mapping[str, Address]:
        """Addresses of the stacks, by name."""
        return self._addresses

    @property
    def mp_group(self) -> ModelParallelGroup:
        """The tensor ranks that hold the other parts of each expert."""
        return self.parallel_region.mp_group

    def local_expert(self, place: int) -> tuple[nn.Module, dict[str, Tensor]]:
        """Return local expert number `place`: a module on the meta device, and its slices of the stacks."""
        (template,) = self._template
        return template, {name: stack[place] for name, stack in self.stacked.named_parameters()}

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Compute the rows of this rank's experts.

        rows: (rows, hidden), sorted by expert.
        counts: rows of each expert.
        Returns (rows, hidden).
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
            return connect_to_graph(rows, weights.values())
        if isinstance(outputs[0], tuple):
            outputs = [output[0] for output in outputs]
        return torch.cat(outputs).to(rows.dtype)  # not what autocast made of them: a rank without rows cannot know

    def _products(
        self, template: ExpertMLP, weights: Mapping[str, Tensor], rows: Tensor, counts: Sequence[int]
    ) -> Tensor:
        if self.mp_group.size == 1:
            return template.forward_rows(weights, rows, counts)
        partial = {name: weight for name, weight in weights.items() if name != "down.bias"}
        y = self.parallel_region.reduce(template.forward_rows(partial, self.parallel_region.enter(rows), counts))
        return y if "down.bias" not in weights else y + add_rows_bias(weights["down.bias"], counts)

    # -- sharding --------------------------------------------------------------------------------

    def shard(self, expert_group: ModelParallelGroup, tensor: ModelParallelGroup = ALONE) -> None:
        """Keep only this rank's experts, and of each the part of this tensor rank.

        Parameters keep their names and identities.  Raises ValueError as `check_parts`, before anything is changed.
        """
        self.check_parts(expert_group.size, tensor.size)
        (template,) = self._template
        dims = template.split_dims() if isinstance(template, ExpertMLP) and tensor.size > 1 else {}
        whole = dict(self.stacked.named_parameters())
        self.expert_group, self.parallel_region = expert_group, ParallelRegion(tensor)
        self._set_addresses(dims)
        with torch.no_grad():
            for name, param in whole.items():
                param.grad = None
                param.data = part_of(param.data, self._addresses[f"stacked.{name}"])

    def check_parts(self, num_ranks: int, num_tensor: int) -> None:
        """Raise ValueError if the experts cannot be sharded over `num_ranks`, and each over `num_tensor` ranks.

        That is if they do not divide, are sharded already, or are to be split and the expert is no ExpertMLP.
        """
        if self.expert_group.size > 1 or self.mp_group.size > 1:
            raise ValueError("these experts are sharded already: distribute() may be called once.")
        check_divisible(self.num_experts, num_ranks)
        (template,) = self._template
        if num_tensor == 1:
            return
        if not isinstance(template, ExpertMLP):
            raise ValueError(
                f"expert tensor parallelism needs a zpartition.experts.ExpertMLP, but the expert is a "
                f"{type(template).__name__}. Use an ExpertMLP, or do not set enable_expert_tensor_parallelism "
                "(tensor ranks then compute whole experts)."
            )
        if (inner := template.up.out_features) % num_tensor:
            raise ValueError(
                f"an inner size of {inner} does not divide by {num_tensor} tensor ranks. Choose a multiple of that "
                "as inner size, or do not set enable_expert_tensor_parallelism."
            )

    def _set_addresses(self, dims: Mapping[str, int]) -> None:
        """Compute the addresses from the shapes; `dims` of an expert are split over tensor ranks."""
        mine = (self.own.start, self.own.stop)
        for name, param in self.stacked.named_parameters():
            shape = (self.num_experts, *param.shape[1:])
            address = Address(shape, (((mine[0], mine[1]), *((0, size) for size in shape[1:])),))
            if name in dims:
                address = _split_box(address, dims[name] + 1, self.mp_group)
            elif self.mp_group.size > 1:
                address = Address(shape, address.boxes, self.mp_group.size, self.mp_group.rank)
            self._addresses[f"stacked.{name}"] = address

    def extra_repr(self) -> str:
        """Local experts of the total."""
        return f"{self.own.start}-{self.own.stop - 1} of {self.num_experts} x {type(self._template[0]).__name__}"


def check_divisible(num_experts: int, num_ranks: int) -> None:
    """Raise ValueError, with the divisors, if `num_ranks` do not divide the experts."""
    if num_experts < 1 or num_ranks < 1 or num_experts % num_ranks:
        divisors = ", ".join(str(number) for number in range(1, num_experts + 1) if num_experts % number == 0)
        raise ValueError(
            f"{num_experts} experts cannot be sharded evenly over {num_ranks} ranks: choose ep_size "
            f"(autoep_size) from {divisors}, or another number of experts."
        )


def _split_box(address: Address, dim: int, mp_group: ModelParallelGroup) -> Address:
    """Return the part of the one box of `address` that this rank of `mp_group` holds along `dim`."""
    size = address.global_shape[dim]
    share = size // mp_group.size
    inner = split_along(address.global_shape, dim, size, (mp_group.rank * share, (mp_group.rank + 1) * share)).boxes[
        0
    ]
    box = address.boxes[0]
    return Address(address.global_shape, (tuple(inner[at] if at == dim else side for at, side in enumerate(box)),))


def connect_to_graph(rows: Tensor, weights: Iterable[Tensor]) -> Tensor:
    """Connect `rows`, which are empty, to the graph of `weights`.

    Ranks whose experts have tokens run a backward here, in which they exchange gradients with this rank; so this rank
    needs one, too, even if its input requires no gradient.
    """
    return rows + sum(weight.reshape(-1)[:0].sum().to(rows.dtype) for weight in weights)


def _build_expert(expert: nn.Module | Callable[[], nn.Module], index: int, seed: Tensor) -> nn.Module:
    """Build expert `index`; expert 0 may be `expert` itself, the others are copies."""
    with seed_scope(seed, index):
        if not isinstance(expert, nn.Module):
            return expert()
        if index:
            expert = copy.deepcopy(expert)
            for child in expert.modules():
                reset: Any = getattr(child, "reset_parameters", None)
                if reset is not None:
                    reset()
        return expert


def _check_no_buffers(expert: nn.Module) -> None:
    if found := set(expert.state_dict()) - {name for name, _ in expert.named_parameters(remove_duplicate=False)}:
        raise ValueError(
            f"the expert has persistent buffers ({', '.join(sorted(found))}), which its copies would share: keep the "
            "state of an expert in parameters, or register constants with persistent=False."
        )


def _copy_to_meta(expert: nn.Module) -> nn.Module:
    """Copy the module to the meta device, to be called with the parameters of others."""
    empty = copy.deepcopy(expert)
    return empty.to("meta")


def _stack_parameters(first: nn.Module, others: Iterable[nn.Module], num_experts: int) -> nn.Module:
    """Build a tree of plain modules with the stacked parameters of all experts, under their names in one expert.

    The modules are plain, so that code that looks for linear layers does not find a stack.  Only one expert is held
    at a time.  Raises ValueError for experts that differ in more than their values.
    """
    root = nn.Module()
    tensors: Iterator[tuple[str, Tensor]] = first.named_parameters()
    for name, param in tensors:
        values = torch.empty((num_experts, *param.shape), dtype=param.dtype, device=param.device)
        parent, leaf = _get_parent(root, name)
        parent.register_parameter(leaf, ExpertParameter(values, requires_grad=param.requires_grad))
    for name, buffer in first.named_buffers():
        parent, leaf = _get_parent(root, name)
        parent.register_buffer(leaf, buffer, persistent=False)
    with torch.no_grad():
        for index, module in enumerate(itertools.chain([first], others)):
            _check_alike(first, module)
            for name, stack in root.named_parameters():
                stack[index].copy_(module.get_parameter(name))
    return root


def _check_alike(first: nn.Module, other: nn.Module) -> None:
    shapes, others = ({name: list(param.shape) for name, param in each.named_parameters()} for each in (first, other))
    if shapes != others:
        raise ValueError(
            f"the experts of a layer must have equal shapes: one has the parameters {others}, the first {shapes}. "
            "Pass a module, or a callable that builds the same module each time."
        )


def _get_parent(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    *path, leaf = name.split(".")
    for part in path:
        if part not in dict(root.named_children()):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root, leaf


def draw_seed() -> Tensor:
    """Draw a number from torch's generator, also while modules are built on the meta device: () int64.

    It has no value yet inside `Init`.
    """
    return torch.randint(2**31, (), device="cpu")


@contextmanager
def seed_scope(number: Tensor, index: int) -> Iterator[None]:
    """Derive random numbers inside from `number` and `index`; the generators are restored afterwards."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    recorded = active_recording()
    if recorded is not None and is_meta(number):
        with recorded.record_seeded(number, partial(_seed, index, [])):
            yield
        return
    with torch.random.fork_rng(devices=devices):
        _seed(index, devices, int(number))
        yield


def _seed(index: int, devices: list[int], number: int) -> None:
    torch.default_generator.manual_seed(number * 1_000_003 + index)
    for device in devices:
        torch.cuda.default_generators[device].manual_seed(number * 1_000_003 + index)
