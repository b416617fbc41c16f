"""Candidates of a tuner: what fits, in the order of its traffic."""

from __future__ import annotations

from typing import Any

import pytest

from zengine.config.keys.autotuning import Autotuning
from zengine.deepspeed.autotuning.candidates import ModelFacts, list_candidates, why_rejected

ROWS = [
    {"stage": 0, "largest_micro_batch": 0, "sent_bytes": [100, 100]},
    {"stage": 1, "largest_micro_batch": 5, "sent_bytes": [100, 100]},
    {"stage": 2, "largest_micro_batch": 6, "sent_bytes": [100, 150]},
    {"stage": 3, "largest_micro_batch": 40, "sent_bytes": [150, 250]},
]
FACTS = ModelFacts.of({"num_params": 10, "replicas": 2, "stages": ROWS}, 2)
UNKNOWN = ModelFacts.of({"num_params": 10, "reason": "reads values"}, 2)


def names(user: dict[str, Any], facts: ModelFacts = FACTS, **keys: Any) -> list[str]:
    return [each.name for each in list_candidates(user, Autotuning(**keys), facts)]


def test_sizes_that_fit_are_halved_and_sorted_by_the_bytes_of_a_sample() -> None:
    assert names({}) == [
        *("z3_gas1_tmbspg40", "z3_gas1_tmbspg32", "z3_gas1_tmbspg16", "z2_gas1_tmbspg6", "z1_gas1_tmbspg5"),
        *("z2_gas1_tmbspg4", "z1_gas1_tmbspg4", "z2_gas1_tmbspg2", "z1_gas1_tmbspg2"),
    ]
    assert names({"zero_optimization": {"stage": 1}}) == [f"z1_gas1_tmbspg{size}" for size in (5, 4, 2)]
    assert names({}, max_train_micro_batch_size_per_gpu=3, num_tuning_micro_batch_sizes=2)[:2] == [
        "z2_gas1_tmbspg3",
        "z1_gas1_tmbspg3",
    ]
    few = names({"zero_optimization": {"stage": [3]}}, min_train_micro_batch_size_per_gpu=33)
    assert few == ["z3_gas1_tmbspg40"]


def test_a_given_batch_is_kept_by_accumulation() -> None:
    user = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": [1, 4, 5, 64]}
    assert names(user) == [
        *("z1_gas3_tmbspg4", "z1_gas12_tmbspg1", "z2_gas3_tmbspg4", "z3_gas3_tmbspg4", "z2_gas12_tmbspg1"),
        "z3_gas12_tmbspg1",
    ]
    (best, *_) = list_candidates(user, Autotuning(), FACTS)
    config = best.config(user)
    assert (config["train_batch_size"], config["gradient_accumulation_steps"]) == (24, 3)
    assert names({"train_micro_batch_size_per_gpu": [4, 5]}, max_train_batch_size=22)[0] == "z1_gas2_tmbspg5"
    assert names({"gradient_accumulation_steps": 3, "zero_optimization": {"stage": 1}})[0] == "z1_gas3_tmbspg5"


def test_lists_of_other_keys_are_combined() -> None:
    user = {"zero_optimization": {"stage": 1, "reduce_bucket_size": [10, 20], "overlap_comm": True}}
    found = list_candidates(user, Autotuning(num_tuning_micro_batch_sizes=1), FACTS)
    assert [each.config(user)["zero_optimization"] for each in found] == [
        {"stage": 1, "reduce_bucket_size": size, "overlap_comm": True} for size in (10, 20)
    ]
    assert found[0].name == "z1_gas1_tmbspg5_reduce_bucket_size10"
    assert user["zero_optimization"]["reduce_bucket_size"] == [10, 20]


def test_an_unknown_model_is_tried_from_its_own_micro_batch_upwards() -> None:
    found = names({"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 2}}, UNKNOWN)
    assert found == [f"z2_gas1_tmbspg{size}" for size in (48, 24, 12, 6, 3)]


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ({"zero_optimization": {"stage": 4}}, 'stage = 4: write 0, 1, 2, 3, a list of them, or "all"'),
        ({"zero_optimization": {"stage": [1, True]}}, "stage = True: write"),
        (
            {"train_batch_size": 7},
            "train_batch_size = 7 does not divide over 2 ranks that read data: write a multiple",
        ),
        ({"train_micro_batch_size_per_gpu": []}, r"= \[\]: a list of sizes has whole numbers >= 1"),
        ({"train_micro_batch_size_per_gpu": [2, 0]}, r"= \[2, 0\]: a list of sizes"),
    ],
)
def test_values_that_are_none_are_errors(user: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        names(user)


def test_a_rejected_config_says_why_and_auto_is_left_to_the_script() -> None:
    accepted = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    assert why_rejected(accepted, 2, 2, "cpu") == ""
    assert why_rejected({**accepted, "train_batch_size": 4}, 4, 2, "cpu") == ""
    assert "train_batch_size 5 = micro 2" in why_rejected({**accepted, "train_batch_size": 5}, 2, 2, "cpu")
    assert (
        why_rejected({**accepted, "zero_optimization": {"stage": 9, "reduce_bucket_size": "auto"}}, 2, 2, "cpu") == ""
    )


def test_a_batch_that_no_power_of_two_divides_has_sizes_that_do() -> None:
    stage = {"zero_optimization": {"stage": 3}}
    assert names({"train_batch_size": 100, **stage}) == [
        *("z3_gas2_tmbspg25", "z3_gas5_tmbspg10", "z3_gas10_tmbspg5"),
    ]
    assert names({"train_batch_size": 26, **stage}, min_train_micro_batch_size_per_gpu=2) == ["z3_gas1_tmbspg13"]
