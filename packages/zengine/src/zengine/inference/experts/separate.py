"""Stacked experts, and stacks cut into single layers.

Transformers keeps the experts of a block in one module whose parameters have the experts in front: `gate_up_proj`,
(experts, 2 * grown, width), and `down_proj`, (experts, width, grown); called as `experts(hidden_states, top_k_index,
top_k_weights)`.  Such a module is recognized by its signature, its shapes, and what it computes with small weights in
the place of its own, so it need not have memory yet.

`separate` replaces it by a module whose matrices are linear layers of their own, `gate_up_proj.3` and so on, so that
whatever quantizes, packs, measures or loads linear layers serves experts, too.

A stack that is sharded over expert ranks becomes the layers of this rank's experts, under the numbers that they have
among all, `gate_up_proj.5`, with the dispatch of the stack around them.  So a matrix has the same name, format and
codes whatever the number of ranks.

Rejected: a quantized stack (a second form of every function that meets a quantized layer).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.func import functional_call

from zengine.inference.matching import ACTIVATIONS, closest
from zengine.inference.structure import MLP, Projection, Unary
from zpartition.experts import dispatch_around, num_experts_of, own_experts_of, own_hf_experts

__all__ = [
    *("SeparateExperts", "Stack", "activation_of", "chosen_stacks", "separate", "separate_chosen", "stack_of"),
    "stacks_in",
]

_TOKENS, _WIDTH, _GROWN = 3, 16, 24  # of the experts that a class is tried with


@attrs.frozen(kw_only=True, eq=False)
class Stack:
    """Names and order of the matrices of stacked experts."""

    up: str  # name of a parameter, (experts, rows, width); if `is_fused`, the gate's rows before its own
    down: str  # (experts, width, grown)
    gate: str = ""
    is_fused: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters."""
        return tuple(each for each in (self.gate, self.up, self.down) if each)

    def mlp(self, module: nn.Module, path: str, expert: int, act: Unary) -> MLP:
        """Return an expert that `module`, called `path`, holds; expert: its number among those of all ranks."""
        first = own_experts_of(module).start

        def matrix(name: str) -> Projection:
            held: Any = getattr(module, name)
            layers: Any = held if isinstance(held, nn.ModuleDict) else None
            weight = held[expert - first] if layers is None else layers[str(expert)].weight
            return Projection(f"{path}.{name}.{expert}", weight)

        gate = matrix(self.gate) if self.gate else None
        return MLP(up=matrix(self.up), down=matrix(self.down), act=act, gate=gate, is_fused=self.is_fused)


def stack_of(module: nn.Module) -> Stack | None:
    """Return the order of stacked experts by names and shapes; None if `module` has none, or other parameters.

    module: with the experts of all ranks, or with this rank's.
    """
    if isinstance(module, SeparateExperts):
        return module.stack
    module = own_hf_experts(module) or module
    shapes = {name: tuple(param.shape) for name, param in module.named_parameters()}
    if not _choice_of(module) or any(len(shape) != 3 for shape in shapes.values()):
        return None
    if set(shapes) == {"gate_up_proj", "down_proj"}:
        stack = Stack(up="gate_up_proj", down="down_proj", is_fused=True)
    elif set(shapes) == {"gate_proj", "up_proj", "down_proj"}:
        stack = Stack(up="up_proj", gate="gate_proj", down="down_proj")
    elif set(shapes) == {"up_proj", "down_proj"}:
        stack = Stack(up="up_proj", down="down_proj")
    else:
        return None
    number, width, grown = shapes[stack.down]
    rows = 2 * grown if stack.is_fused else grown
    if getattr(module, "num_experts", None) != number:
        return None
    fits = shapes[stack.up] == (number, rows, width) and shapes.get(stack.gate, (number, grown, width))[1] == grown
    return stack if fits else None


def stacks_in(module: nn.Module) -> Iterator[tuple[str, nn.Module, Stack]]:
    """Yield (name, module, its order) of all stacked experts that are not separate yet."""
    for name, each in module.named_modules():
        if not isinstance(each, SeparateExperts) and (stack := stack_of(each)) is not None:
            yield name, each, stack


@torch.no_grad()
def separate(module: nn.Module, name: str) -> bool:
    """Replace the stacked experts `name` of `module` by separate layers; False if they compute something else.

    The layers hold slices of the stacks.
    """
    experts = module.get_submodule(name)
    stack = stack_of(experts)
    if stack is None or isinstance(experts, SeparateExperts):
        return False
    act = activation_of(experts, stack)
    if act is None:
        return False
    own = own_hf_experts(experts)
    made: nn.Module = SeparateExperts.of(own or experts, stack, act, own_experts_of(experts).start)
    if own is not None:
        made = dispatch_around(made, experts)
    parent, _, last = name.rpartition(".")
    setattr(module.get_submodule(parent), last, made.train(experts.training))
    return True


def chosen_stacks(module: nn.Module, choose: Callable[[str], object | None]) -> Iterator[tuple[str, Stack]]:
    """Yield (name, order) of the stacked experts in `module` of which `choose` chooses a matrix by its name."""
    for name, experts, stack in stacks_in(module):
        numbers = range(num_experts_of(experts))  # of all ranks, which then decide alike
        if name and any(choose(f"{name}.{each}.{expert}") is not None for each in stack.names for expert in numbers):
            yield name, stack


def separate_chosen(module: nn.Module, choose: Callable[[str], object | None]) -> None:
    """Replace the stacked experts of which `choose` chooses a matrix; those that compute something else stay.

    choose: from the name of a matrix, "layers.0.mlp.experts.down_proj.3", to its format; None: not quantized.
    """
    for name, _ in list(chosen_stacks(module, choose)):
        separate(module, name)


@torch.no_grad()
def activation_of(experts: nn.Module, stack: Stack) -> Unary | None:
    """Return the activation with which one chosen expert gives what `experts` gives; None if none does.

    Small random weights stand in for its own: large enough that a clamp of the activations shows.
    """
    if isinstance(experts, SeparateExperts):
        return experts.act_fn
    experts = own_hf_experts(experts) or experts
    given: Any = experts
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    rows = {stack.up: 2 * _GROWN if stack.is_fused else _GROWN, stack.gate: _GROWN}
    with torch.device("cpu"):
        weights = {name: draw(given.num_experts, rows.get(name, _WIDTH), _WIDTH) for name in stack.names}
        weights[stack.down] = draw(given.num_experts, _WIDTH, _GROWN)
        x, index = 4 * draw(_TOKENS, _WIDTH), torch.full((_TOKENS, 1), given.num_experts - 1)
        try:
            wanted = functional_call(experts, weights, (x, index, torch.ones(_TOKENS, 1, dtype=torch.float32)))
        except Exception:  # it needs other arguments
            return None

    def compute(act: Unary) -> Tensor:
        up, down = (Projection("", weights[name][-1]) for name in (stack.up, stack.down))
        gate = Projection("", weights[stack.gate][-1]) if stack.gate else None
        return MLP(up=up, down=down, act=act, gate=gate, is_fused=stack.is_fused)(x)

    return closest(wanted, ((act, functools.partial(compute, act)) for act in ACTIVATIONS))


class SeparateExperts(nn.Module):
    """Experts of a block, each matrix a linear layer; called as the stack was, with experts numbered from 0."""

    def __init__(
        self, stack: Stack, act: Unary, choice: tuple[str, ...], layers: Mapping[str, Mapping[int, nn.Module]]
    ) -> None:
        """choice: names of the arguments after the tokens.  layers: by name in the stack, and number of the expert.

        The numbers are consecutive: those of all experts, or of a rank's.
        """
        super().__init__()
        numbers = sorted(layers[stack.down])
        self.stack, self.act_fn, self.choice = stack, act, choice
        self.first, self.num_experts = numbers[0], len(numbers)
        for name in stack.names:
            setattr(self, name, nn.ModuleDict({str(number): layers[name][number] for number in numbers}))

    @classmethod
    def of(cls, experts: nn.Module, stack: Stack, act: Unary, first: int = 0) -> SeparateExperts:
        """Return layers that hold slices of the stack `experts`; first: the number of its first expert."""
        layers = {
            name: {first + index: _layer(weight) for index, weight in enumerate(getattr(experts, name))}
            for name in stack.names
        }
        return cls(stack, act, _choice_of(experts), layers)

    def forward(self, hidden_states: Tensor, *choice: Tensor, **named: Tensor) -> Tensor:
        """(tokens, width), (tokens, k) chosen experts, (tokens, k) weights -> (tokens, width)."""
        index, weights = (*choice, *(named[name] for name in self.choice if name in named))
        out = torch.zeros_like(hidden_states)
        for expert in sorted(set(index.flatten().tolist())):
            if not 0 <= expert < self.num_experts:
                continue
            row, column = (index == expert).nonzero(as_tuple=True)
            y = self._expert(expert, hidden_states[row]) * weights[row, column, None]
            out.index_add_(0, row, y.to(out.dtype))
        return out

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        def product(name: str, x: Tensor) -> Tensor:
            layers: Any = getattr(self, name)
            y: Tensor = layers[str(self.first + expert)](x)
            return y

        stack, up = self.stack, product(self.stack.up, x)
        if stack.is_fused:
            gate, up = up.chunk(2, dim=-1)
            return product(stack.down, self.act_fn(gate) * up)
        if stack.gate:
            return product(stack.down, self.act_fn(product(stack.gate, x)) * up)
        return product(stack.down, self.act_fn(up))


def _choice_of(experts: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments after the tokens: chosen experts and their weights; empty for others."""
    tokens, *others = (*inspect.signature(experts.forward).parameters, "")
    return tuple(others[:2]) if tokens == "hidden_states" and len(others) == 3 else ()


def _layer(weight: Tensor) -> nn.Linear:
    """Return a linear layer over memory that exists."""
    rows, columns = weight.shape
    layer = nn.Linear(columns, rows, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer
