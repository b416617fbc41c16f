"""Expert parallelism for Hugging Face's MoE blocks, without changes to their code.

Since version 5 Transformers keeps the experts of a block in one module whose parameters have the experts in front
(`gate_up_proj`, `down_proj`, sometimes biases), called as `experts(hidden_states, top_k_index, top_k_weights)`.  Such
a module is recognized by that signature and those shapes, for any model.  Its class is replaced by one that
dispatches rows to their experts' ranks, and there calls the *original* forward with one choice of weight 1 for each
row.  So activations, clamps and biases stay the model's own, and routers, shared experts and auxiliary losses, which
are outside of the module, are not affected.

`dispatch_around` puts the same dispatch around another module, which computes this rank's experts in another way:
with quantized layers, say.

Rejected: a list of models; products of our own on their weights (models differ in details).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import zcomm
from zpartition.experts.dispatch import TokenDispatch
from zpartition.experts.row_padding import RowPadding
from zpartition.experts.stacked import check_divisible, connect_to_graph, mark_experts
from zpartition.layout.address import Address
from zpartition.layout.hf_experts import ShardedHFExperts, choice_of
from zpartition.layout.model_parallel import ALONE, ModelParallelGroup
from zpartition.tensors.whole import part_of

__all__ = [
    "dispatch_around",
    "num_experts_of",
    "own_experts_of",
    "own_hf_experts",
    "shard_hf_experts",
    "whole_hf_experts",
]

_made_classes: dict[type[nn.Module], type[nn.Module]] = {}


def num_experts_of(stack: nn.Module) -> int:
    """Return the number of experts of any kind of stack, on all ranks."""
    if isinstance(stack, nn.ModuleList):
        return len(stack)
    return int(getattr(stack, "num_global_experts", 0) or getattr(stack, "num_experts", 0))


def own_experts_of(stack: nn.Module) -> range:
    """Return the numbers that this rank's experts of a Hugging Face stack have among those of all ranks."""
    group = stack.expert_group if isinstance(stack, _ShardedHFExperts) else ALONE
    share = num_experts_of(stack) // group.size
    return range(group.rank * share, (group.rank + 1) * share)


def shard_hf_experts(module: nn.Module, expert_group: ModelParallelGroup) -> None:
    """Keep only this rank's experts; parameters keep their names and identities.

    Raises ValueError if the experts do not divide, before anything is changed.
    """
    numbers: Any = module
    check_divisible(numbers.num_experts, expert_group.size)
    share = numbers.num_experts // expert_group.size
    own = (expert_group.rank * share, (expert_group.rank + 1) * share)
    found: dict[str, Address] = {}
    for name, param in module.named_parameters():
        shape = tuple(param.shape)
        found[name] = Address(shape, ((own, *((0, size) for size in shape[1:])),))
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.grad = None
            param.data = part_of(param.data, found[name])
            mark_experts(param)
    choice = choice_of(type(module))
    _set_class(module)
    numbers.num_global_experts, numbers.num_experts = numbers.num_experts, share
    numbers.expert_group, numbers.expert_addresses, numbers.choice = expert_group, found, choice


def _set_class(module: nn.Module) -> None:
    """Let a module dispatch tokens around its forward."""
    kind = type(module)
    if kind not in _made_classes:
        _made_classes[kind] = type(f"ExpertParallel{kind.__name__}", (_ShardedHFExperts, kind), {})
    module.__class__ = _made_classes[kind]


def dispatch_around(own: nn.Module, stack: nn.Module) -> nn.Module:
    """Return `own` with the dispatch of the sharded `stack`, in whose place it computes this rank's experts.

    own: called as the original class, with experts numbered from 0, also if its parameters have other names and
        shapes, or if it has none; they have no addresses, so it is for inference.
    """
    given: Any = stack
    assert isinstance(stack, _ShardedHFExperts)
    _set_class(own)
    for name in ("num_global_experts", "num_experts", "expert_group", "choice"):
        setattr(own, name, getattr(given, name))
    own.__dict__["expert_addresses"] = {}
    return own


def own_hf_experts(module: nn.Module) -> nn.Module | None:
    """Return this rank's part of a sharded stack as a module of its original class, over the same parameters.

    None for other modules.
    """
    if not isinstance(module, _ShardedHFExperts):
        return None
    kind: type[nn.Module] = type(module).__bases__[1]
    made = kind.__new__(kind)
    of_dispatch = ("num_global_experts", "expert_group", "expert_addresses", "choice")
    made.__dict__.update({name: value for name, value in vars(module).items() if name not in of_dispatch})
    made.__dict__["_parameters"] = dict(module._parameters)
    return made


def whole_hf_experts(module: nn.Module) -> nn.Module | None:
    """Return a copy of a sharded stack, of its original class, with the experts of all ranks.  Collective.

    It has memory of its own for the experts; buffers are shared.  None for other modules.
    """
    made = own_hf_experts(module)
    if made is None:
        return None
    assert isinstance(module, _ShardedHFExperts)
    made.__dict__["_parameters"] = {}
    group = module.expert_group
    for name, param in module.named_parameters():
        whole = param.new_empty(group.size * param.numel())
        zcomm.all_gather(whole, param.detach().contiguous().view(-1), group.group, label=name)
        shape = (group.size * param.shape[0], *param.shape[1:])
        made.register_parameter(name, nn.Parameter(whole.view(shape), requires_grad=False))
    made.__dict__["num_experts"] = module.num_global_experts
    return made


class _ShardedHFExperts(ShardedHFExperts):
    """Makes a stack an `ExpertShardedModule`, and dispatches tokens around its original forward."""

    expert_group: ModelParallelGroup
    num_global_experts: int
    expert_addresses: Mapping[str, Address]
    choice: tuple[str, ...]  # the model's names for chosen experts and their weights
    mp_group = ALONE

    def addresses(self) -> Mapping[str, Address]:
        """Addresses of its parameters."""
        return self.expert_addresses

    def forward(self, hidden_states: Tensor, *choice: Tensor, **named: Tensor) -> Tensor:
        """Compute as the original module: (tokens, hidden), (tokens, k), (tokens, k) -> (tokens, hidden)."""
        index, weights = (*choice, *(named[name] for name in self.choice if name in named))
        kept = (index >= 0) & (index < self.num_global_experts)
        dispatch = TokenDispatch.plan(index.long(), kept, self.num_global_experts, self.expert_group)
        rows = dispatch.send(hidden_states)
        y = self._compute_rows(rows, dispatch.counts) if rows.shape[0] else connect_to_graph(rows, self.parameters())
        return dispatch.combine(y, torch.where(kept, weights, 0.0)).to(hidden_states.dtype)

    def _compute_rows(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Call the original forward with one choice of weight 1 for each row."""
        sizes = [param[0].numel() for param in self.parameters() if param.dim() > 2]
        plain = RowPadding(tuple(counts), tuple(counts))  # of layers that are quantized
        padding = RowPadding.choose(rows, counts, max(sizes)) if sizes else plain
        rows = padding.spread(rows)
        numbers = torch.repeat_interleave(torch.tensor(padding.padded)).to(rows.device)
        weights = rows.new_ones(rows.shape[0], 1)
        y: Tensor = super().forward(rows, numbers[:, None], weights)
        return padding.collect(y.to(rows.dtype))
