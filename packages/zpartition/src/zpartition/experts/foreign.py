"""Stacks of experts that other libraries made, as they are: Hugging Face's MoE blocks.

Since version 5 Transformers keeps the experts of a block in one module whose parameters have the experts in front
(`gate_up_proj`, `down_proj`, sometimes biases), called as `experts(hidden_states, top_k_index, top_k_weights)`.  Such
a module is recognised by that signature and those shapes, whatever the model.  Its class is changed to one that
sends rows to their experts' ranks, and calls the *original* forward there with one choice of weight 1 for each row.
So activations, clamps and biases stay the model's own; routers, shared experts and auxiliary losses, which are
outside of the module, do not notice.

Rejected: a list of models; our own products on their weights (each model has its own twist).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zpartition.cells import ALONE, Cell
from zpartition.experts.bank import refuse_uneven, with_graph_of
from zpartition.experts.dispatch import Shipment
from zpartition.experts.parameter import as_experts
from zpartition.shard import Address
from zpartition.whole import part_of

__all__ = ["is_dealt_foreign", "is_foreign", "number_of", "share_out_foreign"]

# What forward takes after the tokens, by the names in use: chosen experts and their weights, (tokens, k).
_CHOICES = (("top_k_index", "top_k_weights"), ("router_indices", "routing_weights"))
_made: dict[type[nn.Module], type[nn.Module]] = {}


def is_foreign(module: nn.Module) -> bool:
    """Whether `module` is a stack of experts that can be shared out."""
    number = getattr(module, "num_experts", None)
    params = list(module.parameters())
    if isinstance(module, _Foreign) or not isinstance(number, int) or not params:
        return False
    if any(param.dim() < 2 or param.shape[0] != number for param in params):
        return False
    return _choice_of(type(module)) in _CHOICES


def is_dealt_foreign(module: nn.Module) -> bool:
    """Whether `module` is such a stack, of which this rank has a part already."""
    return isinstance(module, _Foreign)


def number_of(stack: nn.Module) -> int:
    """Experts of a stack of any kind, on all ranks."""
    return int(getattr(stack, "num_global_experts", 0) or getattr(stack, "num_experts", 0))


def share_out_foreign(module: nn.Module, deal: Cell) -> None:
    """Keep this rank's experts alone; parameters keep their names and identities.

    Raises ValueError if the experts do not divide, before anything is changed.
    """
    numbers: Any = module
    refuse_uneven(numbers.num_experts, deal.size)
    share = numbers.num_experts // deal.size
    own = (deal.rank * share, (deal.rank + 1) * share)
    found: dict[str, Address] = {}
    for name, param in module.named_parameters():
        shape = tuple(param.shape)
        found[name] = Address(shape, ((own, *((0, size) for size in shape[1:])),))
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.grad = None
            param.data = part_of(param.data, found[name])
            as_experts(param)
    kind = type(module)
    if kind not in _made:
        _made[kind] = type(f"ExpertParallel{kind.__name__}", (_Foreign, kind), {})
    module.__class__ = _made[kind]
    numbers.num_global_experts, numbers.num_experts = numbers.num_experts, share
    numbers.deal, numbers.dealt_addresses, numbers.choice = deal, found, _choice_of(kind)


def _choice_of(kind: type[nn.Module]) -> tuple[str, ...]:
    """Names of the second and third argument of its forward."""
    _, tokens, *others = (*inspect.signature(kind.forward).parameters, "", "")
    return tuple(others[:2]) if tokens == "hidden_states" else ()


class _Foreign(nn.Module):
    """Makes a stack `Dealt`, and sends tokens around its own forward."""

    deal: Cell
    num_global_experts: int
    dealt_addresses: Mapping[str, Address]
    choice: tuple[str, ...]  # what the model calls chosen experts and their weights
    cell = ALONE

    def addresses(self) -> Mapping[str, Address]:
        """Of its parameters."""
        return self.dealt_addresses

    def forward(self, hidden_states: Tensor, *choice: Tensor, **named: Tensor) -> Tensor:
        """As the module that it was: (tokens, hidden), (tokens, k), (tokens, k) -> (tokens, hidden)."""
        index, weights = (*choice, *(named[name] for name in self.choice if name in named))
        kept = (index >= 0) & (index < self.num_global_experts)
        shipment = Shipment.plan(index.long(), kept, self.num_global_experts, self.deal)
        rows = shipment.send(hidden_states)
        y = self._computed(rows, shipment.counts) if rows.shape[0] else with_graph_of(rows, self.parameters())
        return shipment.fetch(y, torch.where(kept, weights, 0.0)).to(hidden_states.dtype)

    def _computed(self, rows: Tensor, counts: list[int]) -> Tensor:
        """One choice of weight 1 for each row."""
        numbers = torch.repeat_interleave(torch.tensor(counts)).to(rows.device)
        weights = rows.new_ones(rows.shape[0], 1)
        y: Tensor = super().forward(rows, numbers[:, None], weights)
        return y.to(rows.dtype)
