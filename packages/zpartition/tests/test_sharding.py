"""`shard`: from a module and a policy to a partition."""

from __future__ import annotations

import pytest
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
    assert partition.unsharder.units == {}


class _Whole(torch.optim.SGD):
    """It could be told of cuts, but not as it is configured."""

    elementwise = False

    def place_on_ranks(self, segments: object, ranks: object) -> None:
        self.check_cuts()

    def check_cuts(self) -> None:
        raise ValueError("not cut, please")


def test_an_optimizer_that_cannot_be_given_shards_is_rejected_before_anything_moves() -> None:
    module = model().to(torch.bfloat16)
    for optimizer in (_Whole(module.parameters(), lr=0.1), torch.optim.Adafactor(module.parameters())):
        places = [param.data_ptr() for param in module.parameters()]
        with pytest.raises(ValueError, match=r"not cut, please|needs whole tensors of full precision"):
            zpartition.shard(module, optimizer)  # weights in half precision have masters of their own, even alone
        assert [param.data_ptr() for param in module.parameters()] == places


def test_after_a_refusal_the_optimizer_and_the_module_are_as_they_were() -> None:
    module = model()
    optimizer = torch.optim.AdamW((p for p in module.parameters() if p.requires_grad), lr=0.1)
    params = list(optimizer.param_groups[0]["params"])
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.state[params[0]]["codebook"] = torch.zeros(7)
    kept = {param: optimizer.state[param]["exp_avg"] for param in params}
    before = [param.detach().clone() for param in params]
    with pytest.raises(ValueError, match=r"share a shard with \S+: one 'codebook' is a tensor of shape") as refusal:
        zpartition.shard(module, optimizer)
    assert [id(param) for param in optimizer.param_groups[0]["params"]] == list(map(id, params))
    assert all(optimizer.state[param]["exp_avg"] is moment for param, moment in kept.items())
    assert all(torch.equal(old, param) for old, param in zip(before, params))
    optimizer.state.clear()
    partition = zpartition.shard(module, optimizer)
    assert partition.optimizer is optimizer, f"although somebody holds {refusal.value!r}, and with it the failed one"
