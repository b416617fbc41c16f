"""Experts told apart, for those who want groups of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zengine
from zengine.deepspeed.moe import utils
from zpartition.experts import ExpertMLP, MoE


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), MoE(4, ExpertMLP(4, 6), num_experts=2))


def test_parameters_of_experts_are_known() -> None:
    names = [name for name, param in model().named_parameters() if utils.is_moe_param(param)]
    assert names == [f"1.experts.stacked.{each}.weight" for each in ("gate", "up", "down")]
    assert utils.has_moe_layers(model()) == (True, 2)
    assert utils.has_moe_layers(nn.Linear(1, 1)) == (False, 0)


def test_groups_of_experts_come_behind_and_keep_their_options() -> None:
    params = list(model().parameters())
    shared, experts = utils.split_params_into_shared_and_expert_params(params)
    (dense, own) = utils.configure_moe_param_groups(params)
    assert [id(p) for p in dense["params"]] == [id(p) for p in shared]
    assert [id(p) for p in own["params"]] == [id(p) for p in experts]
    assert (own["moe"], own["name"]) == (True, "dense-params, experts")
    assert utils.is_moe_param_group(own)
    assert not utils.is_moe_param_group(dense)
    groups = utils.split_params_into_different_moe_groups_for_optimizer([{"params": params, "lr": 0.5}], 96)
    assert [len(group["params"]) for group in groups] == [len(shared), 2, 1]
    assert [group["lr"] for group in groups] == [0.5] * 3
    with pytest.raises(TypeError, match="must be a list, got generator"):
        utils.configure_moe_param_groups(param for param in params)


def test_gradients_are_told_apart_where_there_are_some() -> None:
    found = model()
    found[1](found[0](torch.randn(3, 4)))[0].sum().backward()
    next(iter(found.parameters())).grad = None
    shared, experts = utils.split_params_grads_into_shared_and_expert_params(found.parameters())
    assert (len(shared), len(experts)) == (2, 3)


def test_an_engine_trains_such_groups() -> None:
    found = model()
    groups = utils.configure_moe_param_groups(list(found.parameters()))
    before = [param.detach().clone() for param in found.parameters()]
    engine = zengine.initialize(
        model=found,
        model_parameters=groups,
        config={"train_batch_size": 3, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    )[0]
    y, aux_loss, _ = engine(torch.randn(3, 4))
    engine.backward(y.square().sum() + aux_loss)
    engine.step()
    assert all(not torch.equal(param, old) for param, old in zip(found.parameters(), before))
    engine.close()
