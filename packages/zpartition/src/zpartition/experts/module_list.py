"""Expert parallelism for a list of experts (`nn.ModuleList`), whatever code calls them.

Problem.  The forward of such a layer is the user's: it loops over all experts, or over those with tokens, in any
order, and calls `self.experts[i](rows)`.  Ranks differ in which experts they call, and how often.

Design.  The code stays, and each call becomes a request.  Between the beginning and the end of the layer's forward
the expert-parallel ranks go through *rounds*.  In a round every rank posts one request (the number of an expert and
its rows) or none; the rows go to the ranks of the experts, which run them, each request by itself and in its own
shape, and return the outputs.  A rank that has left its loop posts empty requests until all have.  So nothing is
assumed about routing, order or row-wise experts, and the result is that of the same call in one process.

Backward goes through the rounds in the opposite order on all ranks, though they call different experts: a token
passes through all rounds, so that a round's backward waits for that of the next one.  The layer's outputs take the
token last, which also saves a tensor: recomputation in activation checkpointing then runs to the last round.

Parameters keep their names and identities on all ranks.  A rank's own experts are whole, the others are empty parts
of the global tensors (Address), so optimizers fit, and checkpoints and exports have the names of the model's code
and load at any number of expert ranks.  At ZeRO stage 3 the layer is one unit (layout/units.py): which experts run
depends on data.  For the same reason backward reads its weights before the first round: a rank that has nothing to
compute in that round would gather them later than the others.

Rejected.  Stacked parameters and grouped products, as for the other kinds of experts: the user's forward does not
call them, names would change, and to replace the forward its routing must be known.  Running the forward twice, first
to collect the rows of all experts: code that counts, or draws random numbers, would do so twice.  The price is that
ranks which request the same expert in a round wait for its owner, while other owners are idle: memory is distributed,
computation less so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import Function

import zcomm
from zpartition._compat import tree_map_only, uncompiled
from zpartition.experts.stacked import check_divisible
from zpartition.layout.address import Address
from zpartition.layout.expert_lists import ShardedExpertList
from zpartition.layout.model_parallel import ALONE, ModelParallelGroup, ModelParallelModule
from zpartition.tensors.whole import part_of

__all__ = ["check_expert_list", "shard_expert_list"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_DIMS = 6
_NONE = -1  # expert of an empty request

_layer_classes: dict[type[nn.Module], type[nn.Module]] = {}
_expert_classes: dict[type[nn.Module], type[nn.Module]] = {}


def check_expert_list(path: str, experts: nn.ModuleList, num_ranks: int) -> None:
    """Raise ValueError, with the path, for experts that cannot be sharded over `num_ranks` ranks."""
    if isinstance(experts[0], _RemoteExpert):
        raise ValueError(f"{path} is sharded already: distribute() may be called once.")
    check_divisible(len(experts), num_ranks)
    shapes = [{name: list(param.shape) for name, param in expert.named_parameters()} for expert in experts]
    for index, found in enumerate(shapes):
        if found != shapes[0]:
            raise ValueError(
                f"experts {path}.0 and {path}.{index} have different parameters ({shapes[0]} and {found}); only "
                "equal ones are sharded. Exclude this layer with expert_parallel.moe_layer_pattern."
            )
    if any(isinstance(child, ModelParallelModule) for child in experts.modules()):
        raise ValueError(
            f"experts of {path} are split over tensor ranks already: keep them whole in the tensor-parallel plan "
            '("partition_type": "skip"), so that they can be sharded over expert ranks.'
        )
    if scalars := [name for name, shape in shapes[0].items() if not shape]:
        raise ValueError(f"{path}.0.{scalars[0]} is a scalar: give it the shape (1,), so that it can be sharded.")
    params = [id(param) for expert in experts for param in expert.parameters()]
    if len(set(params)) < len(params):
        raise ValueError(f"experts of {path} share parameters: give each expert its own.")
    persistent = set(experts.state_dict()) - {name for name, _ in experts.named_parameters(remove_duplicate=False)}
    if persistent:
        raise ValueError(
            f"{path} has persistent buffers ({sorted(persistent)[0]}, ...), which one rank alone would update: keep "
            "the state of an expert in parameters, or register constants with persistent=False."
        )


def shard_expert_list(layer: nn.Module, path: str, name: str, expert_group: ModelParallelGroup) -> None:
    """Keep only this rank's experts of the list `name` of `layer`, in place; `check_expert_list` has passed."""
    experts = layer.get_submodule(name)
    assert isinstance(experts, nn.ModuleList)
    share = len(experts) // expert_group.size
    addresses: dict[str, Address] = {}
    with torch.no_grad():
        for index, expert in enumerate(experts):
            is_own = index // share == expert_group.rank
            for key, param in expert.named_parameters():
                shape = tuple(param.shape)
                sides = ((0, shape[0] if is_own else 0), *((0, size) for size in shape[1:]))
                addresses[f"{name}.{index}.{key}"] = Address(shape, (sides,))
                param.grad = None
                param.data = part_of(param.data, addresses[f"{name}.{index}.{key}"])
    _set_class(layer, _layer_classes, _ExpertListLayer)
    untyped: Any = layer
    untyped.expert_group, untyped.expert_addresses = expert_group, addresses
    untyped.expert_path, untyped.rounds = path, None
    for index, expert in enumerate(experts):
        _set_class(expert, _expert_classes, _RemoteExpert)
        of_expert: Any = expert
        of_expert.number, of_expert.layer = index, (layer,)  # in a tuple: no child of the expert
    untyped.shared_experts = (experts,)


def _set_class(module: nn.Module, made: dict[type[nn.Module], type[nn.Module]], base: type[nn.Module]) -> None:
    kind = type(module)
    if kind not in made:
        made[kind] = type(f"ExpertParallel{kind.__name__}", (base, kind), {})
    module.__class__ = made[kind]


class _ExpertListLayer(ShardedExpertList):
    """Makes a layer with a list of experts an `ExpertShardedModule`, and encloses its forward with rounds."""

    expert_group: ModelParallelGroup
    expert_addresses: Mapping[str, Address]
    expert_path: str  # of the list
    rounds: _Rounds | None  # of the running forward
    mp_group = ALONE

    def addresses(self) -> Mapping[str, Address]:
        """Addresses of the experts' parameters; a quantized weight is none any more."""
        held = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        return {name: address for name, address in self.expert_addresses.items() if name in held}

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original forward, and serve the other ranks until theirs are done."""
        device = next(self.parameters()).device
        self.rounds = rounds = _Rounds(self.expert_group, self.shared_experts[0], self.expert_path, device)
        try:
            return rounds.finish(super().forward(*args, **kwargs), _one_of_each_storage(self))
        finally:
            self.rounds = None


class _RemoteExpert(nn.Module):
    """An expert whose calls run on the rank that holds it."""

    number: int
    layer: tuple[_ExpertListLayer]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Send a request with the one tensor that it is called with."""
        (layer,) = self.layer
        given = (*args, *kwargs.values())
        if layer.rounds is None or len(given) != 1 or not isinstance(given[0], Tensor):
            problem = (
                "outside of the forward of its layer"
                if layer.rounds is None
                else f"with {', '.join(type(value).__name__ for value in given) or 'nothing'}"
            )
            raise ValueError(
                f"expert {layer.expert_path}.{self.number} was called {problem}. Experts that are sharded over "
                "ranks must be called by the forward of the module that holds their list, with one tensor: "
                "(..., hidden) -> the same shape."
            )
        return layer.rounds.call(self.number, given[0])

    def compute(self, rows: Tensor) -> Tensor:
        """Run the original forward."""
        found: Any = super().forward(rows)
        if not isinstance(found, Tensor) or found.shape != rows.shape:
            raise ValueError(
                f"expert {self.layer[0].expert_path}.{self.number} returned "
                f"{list(found.shape) if isinstance(found, Tensor) else type(found).__name__} for a tensor of shape "
                f"{list(rows.shape)}; experts that are sharded over ranks must return one tensor of the same shape."
            )
        return found.to(rows.dtype)


@final
class _Rounds:
    """The rounds of one forward."""

    def __init__(
        self, expert_group: ModelParallelGroup, experts: nn.ModuleList, path: str, device: torch.device
    ) -> None:
        self.expert_group, self.experts, self.path, self.device = expert_group, experts, path, device
        self.token = torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())

    def call(self, number: int, x: Tensor) -> Tensor:
        """Post a request in the next round, and return its output."""
        found = self._round(number, x)
        assert found is not None
        return found

    def finish(self, output: Any, weights: Sequence[Tensor]) -> Any:
        """Serve rounds until no rank has a request; `output` is the layer's, whose backward reads `weights` first."""
        while self._round(_NONE, None) is not None:
            pass
        tensors: list[Tensor] = []
        tree_map_only(Tensor, lambda leaf: tensors.append(leaf), output)
        if not any(tensor.is_floating_point() for tensor in tensors):
            raise ValueError(
                f"the layer with {self.path} returned no tensor; return the sum of the experts' outputs."
            )
        return tree_map_only(Tensor, lambda leaf: self._with_token(leaf, weights), output)

    def _with_token(self, leaf: Tensor, weights: Sequence[Tensor]) -> Tensor:
        return _apply(_TakeToken, leaf, self.token, *weights) if leaf.is_floating_point() else leaf

    def _round(self, number: int, x: Tensor | None) -> Tensor | None:
        """Run a round; returns the output of this rank's request, rows of it if it is empty, None after the last."""
        numbers, shapes, dtypes = self._headers(number, x)
        kinds = {(shape[-1], dtype) for at, shape, dtype in zip(numbers, shapes, dtypes) if at != _NONE}
        if not kinds:
            return None
        if len(kinds) > 1:
            listed = " and ".join(f"{width} features of {_DTYPES[dtype]}" for width, dtype in sorted(kinds))
            raise ValueError(
                f"ranks call experts of {self.path} with {listed}; tensors must have one width and dtype."
            )
        width, dtype = next(iter(kinds))
        group, me, share = self.expert_group, self.expert_group.rank, len(self.experts) // self.expert_group.size
        owners = [at // share if at != _NONE else _NONE for at in numbers]
        lengths = [torch.Size(shape[:-1]).numel() if at != _NONE else 0 for at, shape in zip(numbers, shapes)]
        runs = tuple(
            tuple((length if owner == rank else 0,) for rank in range(group.size))
            for owner, length in zip(owners, lengths)
        )
        empty = torch.empty(0, width, dtype=_DTYPES[dtype], device=self.device)
        rows = empty if x is None else x.reshape(-1, width)
        self.token, received = _Send.apply(self.token, rows, runs, group)  # type: ignore[no-untyped-call]
        mine = [rank for rank, owner in enumerate(owners) if owner == me]
        parts = torch.split(received, [lengths[rank] for rank in mine])
        outputs = [
            self._compute(numbers[rank], part.view(shapes[rank])).reshape(-1, width)
            for rank, part in zip(mine, parts)
        ]
        y = torch.cat(outputs) if outputs else received
        found: Tensor
        self.token, found = _Return.apply(self.token, y, runs, group)  # type: ignore[no-untyped-call]
        output: Tensor = found if x is None else found.view(x.shape)
        return output

    def _compute(self, number: int, rows: Tensor) -> Tensor:
        expert = self.experts[number]
        assert isinstance(expert, _RemoteExpert)
        return expert.compute(rows)

    def _headers(self, number: int, x: Tensor | None) -> tuple[list[int], list[list[int]], list[int]]:
        """Exchange (number, shape, dtype) of all requests."""
        shape = [] if x is None else list(x.shape)
        if x is not None and (not 0 < x.dim() <= _MAX_DIMS or x.dtype not in _DTYPES):
            raise ValueError(
                f"expert {self.path}.{number} was called with a {x.dtype} tensor of {x.dim()} dimensions; allowed "
                f"are floating-point tensors of 1 to {_MAX_DIMS}."
            )
        dtype = 0 if x is None else _DTYPES.index(x.dtype)
        own = [number, dtype, len(shape), *shape, *[0] * (_MAX_DIMS - len(shape))]
        header = torch.tensor(own, device=self.device)
        table = header.new_empty(self.expert_group.size, len(own))
        zcomm.all_gather(table.view(-1), header, self.expert_group.group, label="requests to experts")
        found = table.tolist()
        return [row[0] for row in found], [row[3 : 3 + row[2]] for row in found], [row[1] for row in found]


def _one_of_each_storage(layer: nn.Module) -> list[Tensor]:
    """Return a parameter of each memory that holds parameters of `layer`: at stage 3 of each gathered buffer."""
    found: dict[int, Tensor] = {}
    for param in layer.parameters():
        if param.numel():
            found.setdefault(param.untyped_storage().data_ptr(), param.detach())
    return list(found.values())


def _apply(function: type[Function], *args: Any) -> Tensor:
    found: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return found


def _to_experts(rows: Tensor, ctx: Any, label: str) -> Tensor:
    return zcomm.all_to_all_ragged_rows(rows.contiguous(), ctx.runs, ctx.group.group, label=label)


def _from_experts(rows: Tensor, ctx: Any, label: str) -> Tensor:
    return zcomm.return_ragged_rows(rows.contiguous(), ctx.runs, ctx.group.group, label=label)


class _Send(Function):
    """Send rows to the ranks of their experts; backward returns gradients.  The token orders rounds."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, rows: Tensor, runs: Any, group: ModelParallelGroup) -> Any:
        ctx.runs, ctx.group = runs, group
        return token.clone(), _to_experts(rows, ctx, "rows to experts")

    @staticmethod
    def backward(ctx: Any, grad_token: Tensor, grad: Tensor) -> Any:
        return grad_token, _from_experts(grad, ctx, "gradients of rows"), None, None


class _Return(Function):
    """Return outputs to the ranks that requested them."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, rows: Tensor, runs: Any, group: ModelParallelGroup) -> Any:
        ctx.runs, ctx.group = runs, group
        return token.clone(), _from_experts(rows, ctx, "outputs of experts")

    @staticmethod
    def backward(ctx: Any, grad_token: Tensor, grad: Tensor) -> Any:
        return grad_token, _to_experts(grad, ctx, "gradients to experts"), None, None


class _TakeToken(Function):
    """Return an output of the layer, whose backward starts that of the last round."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, token: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(token, *weights)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        token, *weights = ctx.saved_tensors  # gathers sharded weights
        return grad, torch.zeros_like(token), *(None for _ in weights)
