"""Ranks with different configs, models or versions raise at the start."""

from __future__ import annotations

import torch
from torch import nn

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine.build.agreement import first_difference, parameter_lines, plan_lines
from zengine.config import Facts, load, resolve


def _initialize(case: str) -> str:
    rank = zcomm.group_rank()
    features = 3 if case == "model" and rank == 1 else 2
    lr = 0.5 if case == "config" and rank == 1 else 0.1
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": lr}}}
    model = nn.Linear(2, features)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    groups = groups[::-1] if case == "groups" and rank == 1 else groups
    try:
        zengine.initialize(model=model, model_parameters=groups, config=config)
    except zengine.RanksDisagree as error:
        return str(error)
    return "agreed"


def test_equal_ranks_agree():
    assert run_ranks(_initialize, 2, "nothing") == ["agreed", "agreed"]


def test_another_learning_rate_is_named_on_all_ranks():
    for message in run_ranks(_initialize, 2, "config"):
        assert "different plan: rank 0 has" in message
        assert "0.1" in message
        assert "0.5" in message


def test_another_shape_is_named_on_all_ranks():
    for message in run_ranks(_initialize, 2, "model"):
        assert "rank 0 has [weight (2, 2) float32 trainable], rank 1 has [weight (3, 2) float32 trainable]" in message


def test_another_grouping_is_named_on_all_ranks():
    for message in run_ranks(_initialize, 2, "groups"):
        assert "different optimizer: rank 0 has [group 0 holds weight], rank 1 has [group 0 holds bias]" in message


def test_a_missing_line_is_a_difference():
    assert "rank 1 has [(nothing)]" in first_difference([{"parameters": ["a"]}, {"parameters": []}])


def test_parameters_are_described_in_order_with_their_state():
    model = nn.Linear(2, 1).to(torch.bfloat16)
    model.bias.requires_grad_(False)
    assert parameter_lines(model) == ["weight (1, 2) bfloat16 trainable", "bias (1,) bfloat16 frozen"]


def _lines(zero):
    return plan_lines(
        resolve(load({"train_batch_size": 1, "zero_optimization": zero}), Facts(world_size=1, replicas=1))
    )


def test_nodes_may_have_their_drives_under_other_names():
    def zero(path, ratio=1.0):
        return {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": path, "ratio": ratio}}

    assert _lines(zero("/nvme0")) == _lines(zero("/nvme1"))
    assert _lines(zero("/nvme0")) != _lines(zero("/nvme0", 0.5))
    assert _lines(zero("/nvme0")) != _lines({"stage": 2})
