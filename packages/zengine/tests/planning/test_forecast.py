"""The forecast as text and as data."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from zengine.config import Facts, load, resolve
from zengine.planning.advice import with_changes
from zengine.planning.forecast import Forecast, forecast, usable
from zengine.planning.models import Shape, Transformer, token_batches
from zengine.planning.sizes import Workload


def made(room_bytes: int, world_size: int = 1, device: str = "cpu", **source: Any) -> Forecast:
    config = load({"train_batch_size": 8, **source})
    facts = Facts(world_size=world_size, replicas=world_size, device_type=device)
    with torch.device("meta"):
        model = Transformer(Shape(layers=1, width=64, vocabulary=100))
    subject = Workload(module=model, batch=token_batches(8), device=device)
    return forecast(config, resolve(config, facts), facts, subject, room_bytes=room_bytes)


def test_alone_there_is_one_stage_and_nothing_is_sent() -> None:
    found = made(10**9)
    assert [each.stage for each in found.stages] == [0]
    assert found.own_fits
    assert found.usable_bytes == usable(10**9) < 10**9
    assert "on 1 rank (CPU)" in found.text()
    assert "measured" not in found.text()


def test_a_measurement_is_held_against_the_plan() -> None:
    found = attrs.evolve(made(10**9), measured=(2 * 2**30, 2**30))
    assert "2.00 GiB at the peak of a step, 1.00 GiB planned (50%)" in found.text()
    assert found.as_json()["measured"] == {"peak_bytes": 2 * 2**30, "planned_bytes": 2**30}


SHARDED = {
    "stage": 3,
    "offload_param": {"device": "cpu"},
    "zero_hpz_partition_size": 2,
    "zero_quantized_weights": True,
}


@pytest.mark.parametrize("room_bytes", [2 * 10**6, 4 * 10**6, 10**9])
@pytest.mark.parametrize(
    "zero",
    [{"stage": 0}, {"stage": 1, "reduce_at": "boundary"}, SHARDED, {"stage": 2, "shard_group_size": 2}],
    ids=["plain", "boundary", "sharded", "copies"],
)
def test_what_is_said_to_be_best_can_be_written_and_is_what_was_said(zero: dict[str, Any], room_bytes: int) -> None:
    given = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8, "zero_optimization": zero}
    found = made(room_bytes, 4, "cuda", **given)
    assert found.best is not None
    stage, best = found.best
    again = made(room_bytes, 4, "cuda", **with_changes(given, found.best_changes()))
    assert again.own.plan.zero.stage == stage
    assert (again.own.total, again.own.sizes) == (best.total, best.sizes)
    assert again.own_fits
    text = " ".join(found.text().split())
    assert f'"stage": {stage}' in text
    for key, value in found.best_changes().items():
        assert value is not None or f"remove {key}" in text


SHARDING = {"stage": 3, "stage3_param_persistence_threshold": 0}


@pytest.mark.parametrize("size", [1, 2])
def test_the_switch_to_a_rollout_is_a_phase(size: int) -> None:
    hybrid = {"enabled": True, "inference_tp_size": size}
    given = {"train_batch_size": 32, "zero_optimization": SHARDING, "hybrid_engine": hybrid}
    found = made(10**9, 4, **given)
    memory = found.own.sizes.memory
    assert 0 < memory.largest_unit < memory.whole_units
    assert memory.whole_units == memory.whole_parameters > memory.parameters
    assert found.own.switch == memory.whole_units // size + (memory.largest_unit if size > 1 else 0)
    assert found.own.total >= found.own.generation > found.own.switch
    assert "weights of a rollout, without its cache" in found.text()
    assert found.as_json()["own"]["switch_bytes"] == found.own.switch
    small = made(found.own.generation, 4, **given)  # less of it is usable
    assert small.stages[3].largest == 0
    whole = made(10**9, 4, **{**given, "zero_optimization": {"stage": 2}}).own  # only a part is copied
    assert whole.switch == (0 if size == 1 else whole.sizes.memory.parameters // 2)
    other = made(10**9, 4, **{**given, "hybrid_engine": {"enabled": False}})
    assert (other.own.switch, other.own.generation) == (0, 0)
    assert "rollout" not in other.text()


def test_a_compressed_optimizer_has_a_column_for_its_second_phase() -> None:
    onebit = {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 4}}
    found = made(10**9, 2, optimizer=onebit)
    assert "sent compressed" in found.text()
    by_stage = {each["stage"]: each for each in found.as_json()["stages"]}
    assert 0 < by_stage[0]["compressed_bytes"] < by_stage[0]["sent_bytes"] / 20
    assert "sent compressed" not in made(10**9, 2).text()
