"""Sizes of a plan: zpartition's, asked with the plan's own optimizer, micro-steps and stage."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine.config import Facts, Plan, load, resolve
from zengine.planning.models import Shape, Transformer
from zengine.planning.sizes import at_stage, optimizer_factory, sizes


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
    each = plan_of(gradient_accumulation_steps=4, zero_optimization={"reduce_at": "micro_step"})
    often = sizes(model(), each, world_size=8, device="cpu")
    assert often.traffic.total_bytes == 4 * once.traffic.total_bytes == 4 * more.traffic.total_bytes
    assert often.memory.buckets > once.memory.buckets == more.memory.buckets  # in float32, accumulated in place


@pytest.mark.parametrize("stage", [0, 2])
def test_a_pipeline_sends_gradients_once_a_batch(stage: int) -> None:
    given = {"gradient_accumulation_steps": 4, "zero_optimization": {"stage": stage}}
    plan = resolve(
        load({"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": 2}, **given}),
        Facts(world_size=16, replicas=16),
    )
    staged = sizes(model(), plan, world_size=8, device="cpu")
    once = sizes(model(), plan_of(zero_optimization={"stage": stage}), world_size=8, device="cpu")
    given["zero_optimization"] = {"stage": stage, "reduce_at": "micro_step"}
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
    sharded = plan_of(zero_optimization={"stage": 2}, gradient_accumulation_steps=2)
    assert [at_stage(sharded, stage).zero.reduce_at.value for stage in (0, 1, 2)] == ["boundary"] * 2 + ["micro_step"]


def test_the_optimizer_knows_the_names_of_the_parameters() -> None:
    net = model()
    muon = optimizer_factory(net, plan_of(optimizer={"type": "Muon", "params": {"lr": 0.1}}))(list(net.parameters()))
    assert len(muon.param_groups) > 1  # embeddings apart from matrices


def live_bytes(configs: list[dict[str, Any]]) -> list[float]:
    """Bytes through this rank in a step under each config, of gradients and weights, counted as they travel."""
    found = []
    for config in configs:
        engine, *_ = zengine.initialize(model=Transformer(SHAPE), config=config)
        records: list[zcomm.Record] = []
        for _ in range(2):
            records.clear()
            with zcomm.traced(records.append):
                for _ in range(config["gradient_accumulation_steps"]):
                    engine.backward(engine(torch.zeros(1, 8, dtype=torch.long)))
                    engine.step()
        engine.close()
        sent = [each for each in records if each.label.startswith(("gradients[", "weights"))]
        times = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
        found.append(sum(times[each.op] * each.nbytes * (each.group_size - 1) / each.group_size for each in sent))
    return found


SHAPE = Shape(layers=4, width=64, vocabulary=512)
ZEROS = [
    *({"stage": stage} for stage in range(4)),
    {"stage": 0, "reduce_at": "micro_step"},
    {"stage": 1, "reduce_at": "micro_step"},
    *({"stage": 3, "stage3_max_live_parameters": numel} for numel in (0, 100_000, 150_000)),
    {"stage": 3, "stage3_max_live_parameters": 0, "stage3_param_persistence_threshold": 0},
    {"stage": 3, "stage3_max_live_parameters": 0, "zero_hpz_partition_size": 2},
    {"stage": 2, "shard_group_size": 2},
]


@pytest.mark.parametrize("world_size", [2, 4])
def test_traffic_is_what_a_live_step_sends(world_size: int) -> None:
    """Stage by stage, in bf16 and in fp32, in one micro-step and in three."""
    common = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}
    configs: list[dict[str, Any]] = []
    for zero, narrow, accumulation in itertools.product(ZEROS, (False, True), (1, 3)):
        if not ({"zero_hpz_partition_size", "shard_group_size"} & zero.keys() and world_size == 2):
            zero = {"stage3_param_persistence_threshold": 1000, **zero}
            given = {"gradient_accumulation_steps": accumulation, "bf16": {"enabled": narrow}}
            configs.append({**common, **given, "zero_optimization": zero})
    for config, live in zip(configs, run_ranks(live_bytes, world_size, configs)[0]):
        plan = plan_of(world_size, **config)
        with torch.device("meta"):
            module = plan.precision.cast_module(Transformer(SHAPE))
        traffic = sizes(module, plan, world_size=world_size, device="cpu").traffic
        assert traffic.total_bytes == pytest.approx(live, rel=1e-6), config


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_laws_in_bytes_of_a_model(accumulation: int) -> None:
    """n elements of 2 bytes, over W ranks: an all-reduce is 2 x 2 n (W - 1) / W; a gather or a scatter half of it."""
    with torch.device("meta"):
        module = Transformer(Shape(layers=8, width=512, vocabulary=4096)).to(torch.bfloat16)
    numel, world_size, a = sum(param.numel() for param in module.parameters()), 8, accumulation
    half = 2 * numel * (world_size - 1) / world_size
    laws = {(0, 10**9): 2, (1, 10**9): 2, (2, 10**9): a + 1, (3, 10**9): 2 * a, (3, 0): 3 * a}
    for (stage, max_live), halves in laws.items():
        zero = {"stage": stage, "stage3_max_live_parameters": max_live, "stage3_param_persistence_threshold": 0}
        plan = plan_of(world_size, bf16={"enabled": True}, gradient_accumulation_steps=a, zero_optimization=zero)
        sent = sizes(module, plan, world_size=world_size, device="cpu").traffic.total_bytes
        assert sent == pytest.approx(halves * half, rel=0.01), (stage, max_live)
