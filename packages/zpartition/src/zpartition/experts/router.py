"""Router: the gate of an expert layer, with its weight, noise and capacity, and load balancing by a bias.

Balancing without an auxiliary loss (Wang et al. 2024): a bias on the choice moves once a step, by the load that each
expert had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import attrs
import torch
from attrs.validators import ge, gt, in_
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

import zcomm
from zpartition.experts.gates import Routing, capacity_of, top1, top2, topk, update_bias

__all__ = ["Router", "RoutingRule", "balance", "balanced_routers"]

JITTER = 0.01  # inputs of the gate are multiplied by a number from [1 - JITTER, 1 + JITTER] (Fedus et al. 2022)


@attrs.frozen(kw_only=True)
class RoutingRule:
    """Choice of experts, and their capacity."""

    k: int = attrs.field(default=1, validator=ge(1))
    capacity_factor: float = attrs.field(default=1.0, validator=gt(0))  # in training
    eval_capacity_factor: float = attrs.field(default=1.0, validator=gt(0))
    min_capacity: int = attrs.field(default=4, validator=ge(0))
    noise: str = attrs.field(default="", validator=in_(("", "Jitter", "RSample")))  # in training
    drops: bool = True  # tokens beyond capacity
    priority: str = attrs.field(default="random", validator=in_(("random", "position")))  # top-1: order of dropping
    second: str = attrs.field(
        default="sampled", validator=in_(("sampled", "best"))
    )  # top-2: the second expert, in training
    balance_rate: float = attrs.field(default=0.0, validator=ge(0))  # of a bias that balances without a loss; 0: none

    def __attrs_post_init__(self) -> None:
        """Raise ValueError for noise that the gate does not use."""
        if self.noise == "RSample" and (self.k > 1 or self.balance_rate):
            raise ValueError(
                f"noisy_gate_policy 'RSample' samples the one expert of a top-1 gate, and k is {self.k}"
                f"{', with a balancing bias' if self.balance_rate else ''}: use 'Jitter' or None."
            )


@final
class Router(nn.Module):
    """(tokens, hidden) -> Routing.  Computes in float32 for any dtype of the model.

    With a `balance_rate`, token counts accumulate in `load` until `balance` moves `bias`.
    """

    # Names that Transformers models use for tensors that stay in float32 when the rest becomes float16, or any narrow
    # dtype: steps of a bias are smaller than the gap between two numbers of bfloat16.
    _keep_in_fp32_modules = ("bias",)
    _keep_in_fp32_modules_strict = ("bias",)

    bias: Tensor
    load: Tensor

    def __init__(self, hidden_size: int, num_experts: int, rule: RoutingRule) -> None:
        super().__init__()
        self.rule = rule
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)  # as nn.Linear
        if rule.balance_rate:
            self.balance_by_bias(rule.balance_rate)

    def balance_by_bias(self, rate: float) -> None:
        """Balance without an auxiliary loss, by a bias on the choice that moves by `rate` (Wang et al. 2024)."""
        self.rule = attrs.evolve(self.rule, balance_rate=rate)
        self.register_buffer("bias", torch.zeros(self.weight.shape[0]))
        self.register_buffer("load", torch.zeros(self.weight.shape[0], dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor, used: Tensor | None = None) -> Routing:
        """Route tokens; used: (tokens,) bool, False for padding."""
        with torch.autocast(x.device.type, enabled=False):
            x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
            if self.rule.noise == "Jitter" and self.training:
                x = x * torch.empty_like(x).uniform_(1 - JITTER, 1 + JITTER)
            return self._route(linear(x, self.weight.to(x.dtype)), used)

    def capacity(self, num_tokens: int) -> int | None:
        """Maximum number of tokens of an expert; None if no token is dropped."""
        rule = self.rule
        factor = rule.capacity_factor if self.training else rule.eval_capacity_factor
        return (
            capacity_of(num_tokens, self.weight.shape[0], rule.k, factor, rule.min_capacity) if rule.drops else None
        )

    def _route(self, logits: Tensor, used: Tensor | None) -> Routing:
        rule, capacity = self.rule, self.capacity(logits.shape[0])
        if rule.balance_rate:
            routing = topk(logits, rule.k, capacity=capacity, used=used, bias=self.bias.to(logits.dtype))
            if self.training:
                self.load += routing.counts
            return routing
        if rule.k == 1:
            noise = _sample_gumbel(logits) if rule.noise == "RSample" and self.training else None
            drops_randomly = rule.priority == "random" and rule.drops
            priority = torch.rand(logits.shape[0], device=logits.device) if drops_randomly else None
            return top1(logits, capacity=capacity, noise=noise, priority=priority, used=used)
        if rule.k == 2:
            noise = _sample_gumbel(logits) if rule.second == "sampled" and self.training else None
            return top2(logits, capacity=capacity, noise=noise, used=used)
        return topk(logits, rule.k, capacity=capacity, used=used)


def _sample_gumbel(like: Tensor) -> Tensor:
    """Samples of Gumbel(0, 1)."""
    return -torch.empty_like(like).exponential_().log()


def balanced_routers(model: nn.Module) -> list[Router]:
    """Return the routers of `model` that have a bias (`Router.balance_by_bias`)."""
    return [child for child in model.modules() if isinstance(child, Router) and child.rule.balance_rate]


def balance(routers: Sequence[Router], group: ProcessGroup | None = None) -> None:
    """Move the biases by the load since the last call, over all ranks of `group`, which have different data.

    One message for all routers; a collective if there are any.
    """
    if not routers:
        return
    loads = torch.cat([router.load for router in routers])
    zcomm.all_reduce(loads, group, label="tokens for each expert")
    for router, load in zip(routers, torch.split(loads, [router.load.numel() for router in routers])):
        router.bias.copy_(update_bias(router.bias, load, router.rule.balance_rate))
        router.load.zero_()
