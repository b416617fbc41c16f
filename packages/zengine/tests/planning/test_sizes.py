"""Sizes of a plan: zpartition's, asked with the plan's own optimizer, micro-steps and stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zengine.config import Facts, Plan, load, resolve
from zengine.planning.models import Shape, Transformer
from zengine.planning.sizes import at_stage, optimizer_maker, sizes


def plan_of(world_size: int = 8, **source: Any) -> Plan:
    return resolve(
        load({"train_micro_batch_size_per_gpu": 1, **source}), Facts(world_size=world_size, replicas=world_size)
    )


def model() -> nn.Module:
    with torch.device("meta"):
        return Transformer(Shape(layers=2, width=64, vocabulary=500))


def test_states_follow_the_optimizer_of_the_config() -> None:
    numel = sum(param.numel() for param in model().parameters())
    adam = sizes(model(), plan_of(optimizer={"type": "AdamW"}), world_size=8, device="cpu").memory
    sgd = sizes(model(), plan_of(optimizer={"type": "SGD", "params": {"lr": 0.1}}), world_size=8, device="cpu").memory
    assert adam.states == pytest.approx(8 * numel, rel=0.2)
    assert sgd.states == 0
    assert sizes(model(), plan_of(), world_size=8, device="cpu").memory.states == adam.states  # the usual one


def test_accumulation_reaches_memory_and_traffic() -> None:
    once = sizes(model(), plan_of(), world_size=8, device="cpu")
    more = sizes(model(), plan_of(gradient_accumulation_steps=4), world_size=8, device="cpu")
    assert more.traffic.total_bytes == 4 * once.traffic.total_bytes
    assert more.memory.buckets > once.memory.buckets


@pytest.mark.parametrize("stage", [0, 2])
def test_a_pipeline_sends_gradients_once_a_batch(stage: int) -> None:
    given = {"gradient_accumulation_steps": 4, "zero_optimization": {"stage": stage}}
    plan = resolve(
        load({"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": 2}, **given}),
        Facts(world_size=16, replicas=16),
    )
    staged = sizes(model(), plan, world_size=8, device="cpu")
    once = sizes(model(), plan_of(zero_optimization={"stage": stage}), world_size=8, device="cpu")
    each = sizes(model(), plan_of(**given), world_size=8, device="cpu")
    assert staged.traffic.total_bytes == once.traffic.total_bytes < each.traffic.total_bytes


def test_another_stage_drops_what_it_has_no_use_for() -> None:
    plus = {
        "stage": 3,
        "zero_hpz_partition_size": 2,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
    }
    plan = plan_of(zero_optimization=plus)
    for stage in range(4):
        assert at_stage(plan, stage).zero.stage == stage
    assert at_stage(plan, 2).zero.weight_bits == 0
    assert at_stage(plan, 0).zero.gradient_bits == 0
    late = plan_of(zero_optimization={"stage": 1, "reduce_at": "boundary"})
    assert at_stage(late, 2).zero.reduce_at.value == "micro_step"


def test_the_optimizer_knows_the_names_of_the_parameters() -> None:
    net = model()
    muon = optimizer_maker(net, plan_of(optimizer={"type": "Muon", "params": {"lr": 0.1}}))(list(net.parameters()))
    assert len(muon.param_groups) > 1  # embeddings apart from matrices
