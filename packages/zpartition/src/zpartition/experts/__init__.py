"""Expert parallelism: layers of which each token uses a few parts, and ranks that share those parts out."""

from __future__ import annotations

from zpartition.experts.balancing import balance, balanced_routers
from zpartition.experts.bank import Experts
from zpartition.experts.distribute import distribute, expert_degree, find_experts, fitting_experts
from zpartition.experts.gates import Routing, capacity_of, top1, top2, topk
from zpartition.experts.layer import MoE
from zpartition.experts.mlp import ExpertMLP
from zpartition.experts.parameter import ExpertParameter
from zpartition.experts.router import Router, RoutingRule
from zpartition.experts.used import used_shares

__all__ = [
    "ExpertMLP",
    "ExpertParameter",
    "Experts",
    "MoE",
    "Router",
    "Routing",
    "RoutingRule",
    "balance",
    "balanced_routers",
    "capacity_of",
    "distribute",
    "expert_degree",
    "find_experts",
    "fitting_experts",
    "top1",
    "top2",
    "topk",
    "used_shares",
]
