"""Which ranks share a model: the sections, DeepSpeed's older names, and what is wrong with either."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

from zengine.deepspeed.inference.config import DeepSpeedInferenceConfig
from zengine.deepspeed.inference.parallel import ParallelGroup, Parallelism
from zpartition.tensor import TensorPlan


def parallelism(given: dict[str, Any]) -> Parallelism:
    return DeepSpeedInferenceConfig(**given).parallelism


def test_sizes_are_said_in_sections_or_by_older_names():
    new = parallelism({"tensor_parallel": {"tp_size": 2, "tp_grain_size": 4}, "moe": {"enabled": True, "ep_size": 3}})
    assert new.tensor == ParallelGroup(2, key="tensor_parallel.tp_size")
    assert (new.experts, new.grain) == (ParallelGroup(3, key="moe.ep_size"), 4)
    old = parallelism({"mp_size": 2, "ep_size": 3, "moe": True, "moe_experts": 8, "moe_type": "residual"})
    assert (old.tensor.size, old.experts.size, old.expert_counts) == (2, 3, (8,))
    assert parallelism({"tp": 2, "mp_size": 2}).tensor == ParallelGroup(2, key="tensor_parallel.tp_size")


def test_groups_and_an_mpu_come_as_they_are():
    group, mpu = object(), object()
    assert parallelism({"tensor_parallel": {"tp_group": group}}).tensor.group is group
    assert parallelism({"mpu": mpu}).tensor.mpu is parallelism({"tp": {"mpu": mpu}}).tensor.mpu is mpu
    assert parallelism({"mpu": mpu, "tp": {"mpu": mpu, "tp_size": 2}}).tensor.mpu is mpu
    assert (
        parallelism({"moe": {"ep_group": {4: group}}}).experts.group is parallelism({"ep_group": group}).experts.group
    )


@pytest.mark.parametrize(
    "given",
    [
        *({}, {"mp_size": 1, "moe": {}, "ep_size": 1, "moe_experts": [1], "mpu": None}),
        {"tensor_parallel": {"enabled": False, "tp_size": 2}, "moe": {"enabled": False, "ep_size": 2}},
    ],
)
def test_nothing_is_shared_unless_it_is_said(given: dict[str, Any]):
    found = parallelism(given)
    assert found.is_single_rank
    assert (found.expert_counts, found.plan) == ((), None)
    assert not parallelism({"mp_size": 2}).is_single_rank


def test_plans_are_kept_and_policies_of_kernels_are_not():
    plan = TensorPlan(())
    assert parallelism({"tensor_parallel": {"tp_size": 2, "partition_config": plan}}).plan is plan
    policy = {nn.Linear: ("a.b", "c"), nn.Conv1d: "d", nn.Conv2d: nn.Linear, "text": ("e",), nn.Conv3d: ()}
    assert parallelism({"injection_policy": policy}).policy == {nn.Linear: ("a.b", "c"), nn.Conv1d: ("d",)}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"mp_size": 2, "tensor_parallel": {"tp_size": 4}},
            'old name of "init_inference.tensor_parallel.tp_size", wh',
        ),
        ({"ep_size": 2, "moe": {"ep_size": 4}}, 'old name of "init_inference.moe.ep_size", which is also given'),
        (
            {"tensor_parallel": {"tp_size": 2}, "tp": {"tp_size": 2, "tp_grain_size": 4}},
            'another name of "init_inference.tensor_parallel", which is also given',
        ),
        ({"tp": {"tp_group": 5}, "mpu": object()}, "tensor_parallel.tp_group and mpu are both given"),
        ({"moe": {"moe_experts": 4}, "moe_experts": 8}, "init_inference.moe_experts: an old name of"),
        ({"ep_group": object(), "moe": {"ep_group": {8: object()}}}, "init_inference.ep_group: an old name of"),
        ({"tp": {"partition_config": {"layer_specs": []}}, "injection_policy": {nn.Linear: "a"}}, "config and injec"),
        ({"tensor_parallel": {"tp_sise": 2}}, 'tp_sise = 2: unknown key. Did you mean "tp_size"?'),
        ({"tensor_parallel": {"tp_size": True}}, "tp_size = true: needs a whole number >= 1"),
        ({"tp": "two"}, 'tp = "two": another name of "init_inference.tensor_parallel": needs an object'),
        ({"moe": {"type": "sparse"}}, 'moe.type = "sparse": must be one of "standard", "residual"'),
        ({"moe": {"ep_mp_group": 5}}, "ep_mp_group = 5: must be removed"),
        ({"moe_experts": [4, 0]}, "must be >= 1"),
        ({"injection_policy": 5}, "must be a mapping from classes of blocks"),
        ({"tensor_parallel": {"partition_config": 5}}, 'must be a mapping with "layer_specs"'),
    ],
)
def test_what_is_wrong_with_the_words_is_said(given: dict[str, Any], told: str):
    with pytest.raises(ValueError, match=re.escape(told)):
        DeepSpeedInferenceConfig(**given)
