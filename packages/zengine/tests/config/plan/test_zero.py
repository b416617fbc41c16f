"""The keys of ZeRO++ in a plan."""

from __future__ import annotations

from typing import Any

import pytest

from zengine.config import ConfigError, Facts, Plan, load, resolve

ALL = {
    "zero_quantized_weights": True,
    "zero_quantized_nontrainable_weights": True,
    "zero_quantized_gradients": True,
    "zero_hpz_partition_size": 4,
}


def plan(zero: dict[str, Any], replicas: int = 8, ranks_per_host: int = 0) -> Plan:
    facts = Facts(world_size=replicas, replicas=replicas, ranks_per_host=ranks_per_host)
    return resolve(load({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}), facts)


def wire(found: Plan) -> tuple[int, ...]:
    zero = found.zero
    return (
        zero.weight_bits,
        zero.frozen_weight_bits,
        zero.secondary_group_size,
        zero.gradient_bits,
        zero.gradient_hop_size,
    )


def test_each_key_says_what_travels_in_which_form() -> None:
    assert wire(plan({"stage": 3})) == (0, 0, 0, 0, 0)
    assert wire(plan({"stage": 3, **ALL})) == (8, 8, 4, 4, 4)
    assert wire(plan({"stage": 3, "zero_quantized_nontrainable_weights": True})) == (0, 8, 0, 0, 0)
    assert wire(plan({"stage": 3, "zero_hpz_partition_size": 2})) == (0, 0, 2, 0, 0)


@pytest.mark.parametrize(("ranks_per_host", "hop"), [(0, 0), (2, 2), (8, 8), (3, 0)])
def test_gradients_are_summed_inside_a_host_first(ranks_per_host: int, hop: int) -> None:
    found = plan({"stage": 3, "zero_quantized_gradients": True}, ranks_per_host=ranks_per_host)
    assert wire(found) == (0, 0, 0, 4, hop)


def test_nodes_have_to_fill_the_run() -> None:
    with pytest.raises(ConfigError, match=r"zero_hpz_partition_size = 3: .* divide the 8 ranks .* of 1, 2, 4, 8"):
        plan({"stage": 3, "zero_hpz_partition_size": 3})
    with pytest.raises(ConfigError, match=r"zero_hpz_partition_size = 4: .* divide the 2 ranks"):
        plan({"stage": 3, "zero_hpz_partition_size": 4, "shard_group_size": 2})
    assert wire(plan({"stage": 3, "zero_hpz_partition_size": 3}, replicas=1))[2] == 3, "alone, nobody looks"


def test_below_stage_3_they_have_no_effect_and_that_is_said() -> None:
    found = plan({"stage": 2, **ALL})
    assert wire(found) == (0, 0, 0, 0, 0)
    (notice,) = [notice for notice in found.notices if "zero_" in notice]
    assert "zero_optimization.zero_hpz_partition_size, zero_optimization.zero_quantized_weights" in notice
    assert notice.endswith("have no effect here: the stage is not 3")
    assert not [n for n in plan({"stage": 2, "zero_quantized_weights": False}).notices if "stage is not 3" in n]


def test_a_measured_bucket_size_is_left_to_the_partition() -> None:
    found = plan({"stage": 1, "reduce_bucket_size": "measured"})
    assert (found.zero.bucket_sizing.value, found.zero.bucket_numel) == ("measured", 0)
    assert found["zero_optimization.reduce_bucket_size"] == "measured"
    number = plan({"stage": 1, "reduce_bucket_size": 5000})
    assert (number.zero.bucket_sizing.value, number.zero.bucket_numel) == ("derived", 5000)
