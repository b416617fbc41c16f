"""Gates: pure functions from logits to each token's experts and weights.

The rules are those of GShard (Lepikhin et al. 2021, section 2.2, top-2), Switch (Fedus et al. 2022, section 2.2,
top-1) and their generalization to k, with the details of DeepSpeed's gates, so that a model trained there continues
here: an expert's *capacity*, which tokens are dropped beyond it, when weights are normalized, and the auxiliary loss.
Randomness is passed as tensors (`noise`, `priority`); without them a gate is deterministic.

The result is a `Routing`: k experts and weights for each token.  No tensor of shape (tokens, experts, capacity) is
created; a dropped choice has weight 0 and `kept` False.

Rejected: thresholds over the whole batch (expert choice), which look at later tokens to route earlier ones.
"""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor
from torch.nn.functional import one_hot

__all__ = ["Routing", "capacity_of", "top1", "top2", "topk", "update_bias"]


@attrs.frozen(eq=False)
class Routing:
    """Routes of tokens; (tokens, k) unless noted."""

    experts: Tensor  # int64, the chosen ones, the first choice first
    weights: Tensor  # float32, differentiable; 0 where dropped
    kept: Tensor  # bool: chosen and within capacity
    aux_loss: Tensor  # () float32, differentiable: small where tokens are spread evenly
    counts: Tensor  # (experts,) int64: choices of each expert, including dropped ones


def capacity_of(num_tokens: int, num_experts: int, k: int, factor: float, minimum: int) -> int:
    """Maximum number of tokens of an expert: its fair share of the k x tokens choices times `factor`, rounded up."""
    return max(minimum, math.ceil(num_tokens / num_experts * (factor * k)))


def top1(
    logits: Tensor,
    *,
    capacity: int | None = None,
    noise: Tensor | None = None,
    priority: Tensor | None = None,
    used: Tensor | None = None,
) -> Routing:
    """Choose one expert for each token, weighted by its probability (Switch).

    logits: (tokens, experts) float32.
    capacity: None drops no token.
    noise: as `logits`, added for the choice only (RSample).
    priority: (tokens,), an expert over capacity takes the tokens with the largest values (random token selection);
        None: the first tokens.
    used: (tokens,) bool; False for padding, which is not routed.
    """
    gates = logits.softmax(dim=1)
    chosen = (gates if noise is None else logits + noise).argmax(dim=1, keepdim=True)
    wanted = _mask_choices(chosen, used)
    counts, fraction = _count_choices(chosen, wanted, logits)
    aux_loss = _balance_loss(gates, fraction)
    kept = _within_capacity(
        chosen, wanted, capacity, None if priority is None else priority[:, None], logits.shape[1]
    )
    return Routing(chosen, gates.gather(1, chosen) * kept, kept, aux_loss, counts)


def top2(
    logits: Tensor, *, capacity: int | None = None, noise: Tensor | None = None, used: Tensor | None = None
) -> Routing:
    """Choose two experts for each token, with weights normalized over those within capacity (GShard).

    noise: as `logits`, added for the choice of the second expert (sampling by Gumbel's trick).
    All first choices precede all second ones.  The auxiliary loss counts first choices.  Other arguments as in
    `top1`.
    """
    gates = logits.softmax(dim=1)
    first = gates.argmax(dim=1, keepdim=True)
    rest = (logits if noise is None else logits + noise).scatter(1, first, -torch.inf)
    chosen = torch.cat([first, rest.argmax(dim=1, keepdim=True)], dim=1)
    wanted = _mask_choices(chosen, used)
    counts, _ = _count_choices(chosen, wanted, logits)
    _, fraction = _count_choices(first, wanted[:, :1], logits)
    aux_loss = _balance_loss(gates, fraction)
    kept = _within_capacity(chosen, wanted, capacity, None, logits.shape[1])
    return Routing(chosen, _normalize(gates.gather(1, chosen) * kept), kept, aux_loss, counts)


def topk(
    logits: Tensor,
    k: int,
    *,
    capacity: int | None = None,
    used: Tensor | None = None,
    bias: Tensor | None = None,
    by_position: bool = False,
) -> Routing:
    """Choose k experts for each token, with weights normalized over those within capacity.

    With k=1 the weight is the probability, as in `top1`.

    bias: (experts,) float32, added to the probabilities for the choice only (Wang et al. 2024, "auxiliary-loss-free
        load balancing").
    by_position: over capacity an expert takes the first tokens; by default those with the largest logits.
    Other arguments as in `top1`.
    """
    gates = logits.softmax(dim=1)
    chosen = (logits if bias is None else gates.detach() + bias).topk(k, dim=1).indices
    wanted = _mask_choices(chosen, used)
    counts, fraction = _count_choices(chosen, wanted, logits)
    aux_loss = _balance_loss(gates, fraction) / k
    priority = None if by_position else logits.detach().gather(1, chosen)
    kept = _within_capacity(chosen, wanted, capacity, priority, logits.shape[1])
    weights = gates.gather(1, chosen) * kept
    return Routing(chosen, weights if k == 1 else _normalize(weights), kept, aux_loss, counts)


def update_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """Return the bias of the next step: raised by `rate` for experts below the mean load, lowered for those above.

    Wang et al. 2024, algorithm 1; bias, counts: (experts,).
    """
    load = counts.to(bias.dtype)
    return bias + rate * torch.sign(load.mean() - load)


def _mask_choices(chosen: Tensor, used: Tensor | None) -> Tensor:
    """(tokens, k) bool: choices of tokens that are not padding."""
    every = torch.ones_like(chosen, dtype=torch.bool)
    return every if used is None else every & used.to(torch.bool).view(-1, 1)


def _count_choices(chosen: Tensor, wanted: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """(experts,) choices of each expert, and the same as fractions of the tokens."""
    counts = torch.zeros(logits.shape[1], dtype=torch.int64, device=logits.device)
    counts.scatter_add_(0, chosen.reshape(-1), wanted.reshape(-1).to(torch.int64))
    return counts, counts.to(logits.dtype) / max(1, logits.shape[0])


def _balance_loss(gates: Tensor, fraction: Tensor) -> Tensor:
    """(): auxiliary loss of both papers, 1 if tokens are spread evenly; 0 without tokens."""
    mean = gates.sum(dim=0) / max(1, gates.shape[0])
    return (mean * fraction).sum() * gates.shape[1]


def _within_capacity(
    chosen: Tensor, wanted: Tensor, capacity: int | None, priority: Tensor | None, num_experts: int
) -> Tensor:
    """(tokens, k) bool: counted choices among the first `capacity` of their expert.

    All first choices precede all second ones, unless `priority`, shaped as `chosen`, gives the order.
    """
    if capacity is None:
        return wanted
    experts = torch.where(wanted, chosen, num_experts).t().reshape(-1)  # choice by choice; the unwanted last
    rank = torch.arange(experts.numel(), device=experts.device)
    if priority is not None:
        rank = priority.t().reshape(-1).argsort(descending=True, stable=True)
    order = rank[experts[rank].argsort(stable=True)]  # by expert, and inside by rank
    taken = experts[order]
    starts = torch.searchsorted(taken, torch.arange(num_experts + 1, device=taken.device))
    place = torch.arange(taken.numel(), device=taken.device) - starts[taken]
    inside = torch.empty_like(experts, dtype=torch.bool)
    inside[order] = place < capacity
    return wanted & inside.view(chosen.shape[1], -1).t()


def _normalize(weights: Tensor) -> Tensor:
    return weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)


def dense_mask(routing: Routing, num_experts: int) -> Tensor:
    """(tokens, experts): the weight of each expert; for references and plots only."""
    return (one_hot(routing.experts, num_experts) * routing.weights[..., None]).sum(dim=1)
