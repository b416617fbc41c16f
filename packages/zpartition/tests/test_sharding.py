"""From a module and a policy to a partition."""

from __future__ import annotations

import torch
from torch import nn

import zpartition
from zpartition import ZeroPolicy


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40))


def test_a_partition_alone_at_stage_3_is_an_ordinary_module() -> None:
    module = model()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    partition = zpartition.shard(module, policy=ZeroPolicy(stage=3, persist_numel=0))
    assert all(torch.equal(before[name], param) for name, param in module.named_parameters())
    assert partition.residence.units == {}
