"""activation_checkpointing in a plan: rows, and what is told when a key has nothing to do."""

from __future__ import annotations

from typing import Any

import pytest

from zengine.config import ConfigError, Facts, Plan, load, resolve


def plan_of(**section: Any) -> Plan:
    tensor = section.pop("tensor", 1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "activation_checkpointing": section,
        "tensor_parallel": {"autotp_size": tensor},
    }
    return resolve(load(config), Facts(world_size=2, replicas=2))


def about(plan: Plan) -> list[str]:
    return [notice for notice in plan.notices if "activation_checkpointing" in notice]


def test_every_key_is_in_the_table() -> None:
    plan = plan_of(cpu_checkpointing=True, number_checkpoints=None)
    assert plan["activation_checkpointing.cpu_checkpointing"] is True
    assert plan["activation_checkpointing.number_checkpoints"] == 0
    assert len(plan.get("activation_checkpointing")) == 7
    assert plan["activation_checkpointing.modules"] == "(those in the model's code)"
    assert plan_of(modules=["a.*", "b"])["activation_checkpointing.modules"] == "a.*, b"


def test_keys_with_nothing_to_do_are_told() -> None:
    section = {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 3}
    assert about(plan_of(tensor=2, **section)) == []
    (alone,) = about(plan_of(**section))
    assert "partition_activations has no effect here: the tensor-parallel degree is 1" in alone
    (idle,) = about(plan_of(number_checkpoints=3))
    assert "number_checkpoints has no effect here: contiguous_memory_optimization is off" in idle


@pytest.mark.parametrize(
    ("section", "missing"),
    [
        ({}, "partition_activations and number_checkpoints are"),
        ({"number_checkpoints": 2}, "partition_activations is"),
        ({"partition_activations": True}, "number_checkpoints is"),
    ],
)
def test_one_piece_of_memory_needs_parts_and_a_number(section: dict[str, Any], missing: str) -> None:
    with pytest.raises(ConfigError, match=f"in one buffer, and {missing} not set"):
        plan_of(contiguous_memory_optimization=True, **section)
