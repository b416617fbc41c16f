"""Expert parallelism: mixture-of-experts layers, and models whose experts are sharded over ranks."""

from __future__ import annotations

from zpartition._renamed import renamed
from zpartition.experts.distribute import active_fractions, distribute, divisible_experts, expert_degree, find_experts
from zpartition.experts.gates import Routing, capacity_of, top1, top2, topk
from zpartition.experts.huggingface import (
    dispatch_around,
    num_experts_of,
    own_experts_of,
    own_hf_experts,
    whole_hf_experts,
)
from zpartition.experts.layer import MoE
from zpartition.experts.mlp import ExpertMLP
from zpartition.experts.router import Router, RoutingRule, balance, balanced_routers
from zpartition.experts.stacked import ExpertParameter, Experts

__all__ = [
    "ExpertMLP",
    "ExpertParameter",
    "Experts",
    "MoE",
    "Router",
    "Routing",
    "RoutingRule",
    "active_fractions",
    "balance",
    "balanced_routers",
    "capacity_of",
    "dispatch_around",
    "distribute",
    "divisible_experts",
    "expert_degree",
    "find_experts",
    "num_experts_of",
    "own_experts_of",
    "own_hf_experts",
    "top1",
    "top2",
    "topk",
    "whole_hf_experts",
]

RENAMED = {
    "fitting_experts": "divisible_experts",
    "used_shares": "active_fractions",
}
__getattr__ = renamed(__name__, RENAMED)
