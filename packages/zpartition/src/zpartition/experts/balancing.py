"""Moving the biases that balance layers without an auxiliary loss (Wang et al. 2024), once a step."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import ProcessGroup

import zcomm
from zpartition.experts.gates import moved_bias
from zpartition.experts.router import Router

__all__ = ["balance"]


def balance(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Move the bias of every router that has one, by the tokens of all ranks of `group` since the last time.

    group: the ranks with different data.  One message for all layers; a collective.
    """
    routers = [child for child in model.modules() if isinstance(child, Router) and child.rule.balance_rate]
    if not routers:
        return
    loads = torch.cat([router.load for router in routers])
    zcomm.all_reduce(loads, group, label="tokens for each expert")
    for router, load in zip(routers, torch.split(loads, [router.load.numel() for router in routers])):
        router.bias.copy_(moved_bias(router.bias, load, router.rule.balance_rate))
        router.load.zero_()
