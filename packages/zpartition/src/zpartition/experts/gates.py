"""Which experts a token goes to, and with which weight: gates, as pure functions of logits.

The rules are those of GShard (Lepikhin et al. 2021, section 2.2, top-2), Switch (Fedus et al. 2022, section 2.2,
top-1) and their generalisation to k, with the details of DeepSpeed's gates, so that a model trained there goes on
here: what an expert's *capacity* is, who is dropped when more tokens want it, when weights are normalised, and what
the auxiliary loss is.  Randomness comes in as tensors (`noise`, `priority`); without them a gate is deterministic.

What comes out is a `Routing`: for each token k experts and weights.  Nothing of shape (tokens, experts, capacity) is
ever made; a dropped choice is a weight of 0 and `kept` False.

Rejected: thresholds over the whole batch (expert choice), which look at later tokens to route earlier ones.
"""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor
from torch.nn.functional import one_hot

__all__ = ["Routing", "capacity_of", "moved_bias", "top1", "top2", "topk"]


@attrs.frozen(eq=False)
class Routing:
    """Where tokens go; (tokens, k) unless said otherwise."""

    experts: Tensor  # int64, the chosen ones, the first choice first
    weights: Tensor  # float32, differentiable; 0 where dropped
    kept: Tensor  # bool: chosen and within capacity
    aux_loss: Tensor  # () float32, differentiable: small where tokens are spread evenly
    counts: Tensor  # (experts,) int64: choices of each, dropped ones too


def capacity_of(num_tokens: int, num_experts: int, k: int, factor: float, minimum: int) -> int:
    """The most tokens that an expert takes: its fair share of the k x tokens choices times `factor`, rounded up."""
    return max(minimum, math.ceil(num_tokens / num_experts * (factor * k)))


def top1(
    logits: Tensor,
    *,
    capacity: int | None = None,
    noise: Tensor | None = None,
    priority: Tensor | None = None,
    used: Tensor | None = None,
) -> Routing:
    """One expert for each token, weighed by its probability (Switch).

    logits: (tokens, experts) float32.  capacity: None drops nobody.  noise: as `logits`, added for the choice only
    (RSample).  priority: (tokens,), the largest are served first where an expert is over capacity (random token
    selection); None: in order of position.  used: (tokens,) bool, others are padding and go nowhere.
    """
    gates = logits.softmax(dim=1)
    chosen = (gates if noise is None else logits + noise).argmax(dim=1, keepdim=True)
    wanted = _wanted(chosen, used)
    counts, share = _counts(chosen, wanted, logits)
    aux_loss = _imbalance(gates, share)
    kept = _within(chosen, wanted, capacity, None if priority is None else priority[:, None], logits.shape[1])
    return Routing(chosen, gates.gather(1, chosen) * kept, kept, aux_loss, counts)


def top2(
    logits: Tensor, *, capacity: int | None = None, noise: Tensor | None = None, used: Tensor | None = None
) -> Routing:
    """Two experts for each token, weights normalised over those that took it (GShard).

    noise: as `logits`, added for the choice of the second (its sampling, by Gumbel's trick).  All first choices are
    served before all second ones.  The auxiliary loss looks at first choices.  Others as in `top1`.
    """
    gates = logits.softmax(dim=1)
    first = gates.argmax(dim=1, keepdim=True)
    rest = (logits if noise is None else logits + noise).scatter(1, first, -torch.inf)
    chosen = torch.cat([first, rest.argmax(dim=1, keepdim=True)], dim=1)
    wanted = _wanted(chosen, used)
    counts, _ = _counts(chosen, wanted, logits)
    _, share = _counts(first, wanted[:, :1], logits)
    aux_loss = _imbalance(gates, share)
    kept = _within(chosen, wanted, capacity, None, logits.shape[1])
    return Routing(chosen, _normalised(gates.gather(1, chosen) * kept), kept, aux_loss, counts)


def topk(
    logits: Tensor,
    k: int,
    *,
    capacity: int | None = None,
    used: Tensor | None = None,
    bias: Tensor | None = None,
    by_position: bool = False,
) -> Routing:
    """k experts for each token, weights normalised over those that took it (with k=1: its probability, as in `top1`).

    bias: (experts,) float32, added to the probabilities for the choice only (Wang et al. 2024, "auxiliary-loss-free
    load balancing").  Over capacity an expert takes those that want it most, or (`by_position`) those that come
    first.  Others as in `top1`.
    """
    gates = logits.softmax(dim=1)
    chosen = (logits if bias is None else gates.detach() + bias).topk(k, dim=1).indices
    wanted = _wanted(chosen, used)
    counts, share = _counts(chosen, wanted, logits)
    aux_loss = _imbalance(gates, share) / k
    priority = None if by_position else logits.detach().gather(1, chosen)
    kept = _within(chosen, wanted, capacity, priority, logits.shape[1])
    weights = gates.gather(1, chosen) * kept
    return Routing(chosen, weights if k == 1 else _normalised(weights), kept, aux_loss, counts)


def moved_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """The bias for the next step: up by `rate` for experts with less than the mean, down for those with more.

    Wang et al. 2024, algorithm 1; bias, counts: (experts,).
    """
    load = counts.to(bias.dtype)
    return bias + rate * torch.sign(load.mean() - load)


def _wanted(chosen: Tensor, used: Tensor | None) -> Tensor:
    """(tokens, k) bool: choices that count."""
    every = torch.ones_like(chosen, dtype=torch.bool)
    return every if used is None else every & used.to(torch.bool).view(-1, 1)


def _counts(chosen: Tensor, wanted: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """(experts,) choices of each, and the same as parts of the tokens."""
    counts = torch.zeros(logits.shape[1], dtype=torch.int64, device=logits.device)
    counts.scatter_add_(0, chosen.reshape(-1), wanted.reshape(-1).to(torch.int64))
    return counts, counts.to(logits.dtype) / max(1, logits.shape[0])


def _imbalance(gates: Tensor, share: Tensor) -> Tensor:
    """(): the auxiliary loss of both papers, 1 where tokens are spread evenly; 0 without tokens."""
    mean = gates.sum(dim=0) / max(1, gates.shape[0])
    return (mean * share).sum() * gates.shape[1]


def _within(
    chosen: Tensor, wanted: Tensor, capacity: int | None, priority: Tensor | None, num_experts: int
) -> Tensor:
    """(tokens, k) bool: what is wanted, and among the first `capacity` of its expert.

    All first choices come before all second ones, unless `priority`, as `chosen`, says who comes first.
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


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)


def dense_mask(routing: Routing, num_experts: int) -> Tensor:
    """(tokens, experts): the weight of each expert; for oracles and pictures, not for computing."""
    return (one_hot(routing.experts, num_experts) * routing.weights[..., None]).sum(dim=1)
