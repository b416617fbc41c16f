"""Moving the biases that balance layers without an auxiliary loss (Wang et al. 2024), once a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed import ProcessGroup

import zcomm
from zpartition.experts.gates import moved_bias
from zpartition.experts.router import Router

__all__ = ["balance", "balanced_routers"]


def balanced_routers(model: nn.Module) -> list[Router]:
    """Those of `model` that have a bias (`Router.balance_by_bias`)."""
    return [child for child in model.modules() if isinstance(child, Router) and child.rule.balance_rate]


def balance(routers: Sequence[Router], group: ProcessGroup | None = None) -> None:
    """Move the biases by the tokens of all ranks of `group`, those with different data, since the last time.

    One message for all routers; a collective where there are some.
    """
    if not routers:
        return
    loads = torch.cat([router.load for router in routers])
    zcomm.all_reduce(loads, group, label="tokens for each expert")
    for router, load in zip(routers, torch.split(loads, [router.load.numel() for router in routers])):
        router.bias.copy_(moved_bias(router.bias, load, router.rule.balance_rate))
        router.load.zero_()
