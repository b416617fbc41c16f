"""Old configs in the words of today: the plan stays, the notices go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from zengine.config import Facts, Plan, load, resolve
from zengine.config.reading.convert import convert

PUBLISHED = Path(__file__).parents[2] / "commands" / "published"
OLD: dict[str, Any] = {
    "train_batch_size": 8,
    "zero_optimization": {"stage": 3, "cpu_offload": True, "mics_shard_size": 2, "reduce_scatter": True},
    "bfloat16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "zero_allow_untested_optimizer": True,
    "aio": {"thread_count": 4, "block_size": 1048576},
    "vocabulary_size": 1000,
}


def acts(plan: Plan) -> Plan:
    return attrs.evolve(plan, origins={}, notices=(), given={})


def plan_of(source: Any) -> Plan:
    return resolve(load(source), Facts(world_size=4, replicas=4, device_type="cuda"))


@pytest.mark.parametrize(
    "source",
    [
        OLD,
        {"train_batch_size": 8, "zero_optimization": True},
        *(json.loads(path.read_text()) for path in sorted(PUBLISHED.glob("*.json"))),
    ],
)
def test_the_plan_stays_and_a_second_time_changes_nothing(source: dict[str, Any]) -> None:
    converted = convert(source)
    assert acts(plan_of(converted.data)) == acts(plan_of(source))
    assert convert(converted.data) == type(converted)(data=converted.data, changes=())


def test_every_change_is_told_and_nothing_is_left_to_tell() -> None:
    converted = convert(OLD)
    assert converted.data == {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "shard_group_size": 2},
        "bf16": {"enabled": True},
        "aio": {"intra_op_parallelism": 4, "block_size": 1048576},
    }
    assert set(converted.changes) == {
        'zero_optimization.cpu_offload is now zero_optimization.offload_optimizer.device = "cpu"',
        "zero_optimization.mics_shard_size is now zero_optimization.shard_group_size",
        "zero_optimization.reduce_scatter is left out: sharded gradients are always reduce-scattered",
        "bfloat16 is now bf16",
        "fp16 is left out: the section is switched off",
        "zero_allow_untested_optimizer is left out: every torch optimizer is accepted; "
        "if false, deepspeed.initialize() rejects those that DeepSpeed does not know",
        "aio.thread_count is now aio.intra_op_parallelism",
        "vocabulary_size is left out: it only asks for advice on padding",
    }
    assert not any("no effect" in notice or "old name" in notice for notice in load(converted.data).notices)


def test_the_original_is_not_touched() -> None:
    before = json.dumps(OLD)
    convert(OLD)
    assert json.dumps(OLD) == before


def test_keys_that_are_to_go_go() -> None:
    converted = convert({"weight_quantization": {}, "train_batch_size": 4}, drop=frozenset({"weight_quantization"}))
    assert converted.data == {"train_batch_size": 4}
    assert converted.changes == ("weight_quantization is dropped: it is rejected here",)
