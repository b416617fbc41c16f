"""What the data sections have to agree on; every refusal names the key and says what to do."""

from __future__ import annotations

from typing import Any

import pytest

from zengine.config import Facts, load, resolve, violations

LAW = {
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 10},
}
LTD = {
    "enabled": True,
    "total_layer_num": 4,
    "random_ltd_layer_id": [1, 2],
    "random_ltd_schedule": {"min_value": 8, "max_value": 64, "schedule_config": {"require_steps": 9}},
}


def lengths(**changes: Any) -> dict[str, Any]:
    return {"curriculum_learning": {"enabled": True, **LAW, **changes}}


def sampling(**sections: Any) -> dict[str, Any]:
    return {"data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, **sections}}}


def metric(name: str = "seqlen", **changes: Any) -> dict[str, Any]:
    return sampling(curriculum_learning={"enabled": True, "curriculum_metrics": {name: {**LAW, **changes}}})


def packing(**changes: Any) -> dict[str, Any]:
    return sampling(dynamic_batching={"enabled": True, "max_tokens": 64, **changes})


def layers(**changes: Any) -> dict[str, Any]:
    return {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": {**LTD, **changes}}}}


GOOD = [lengths(), metric(), metric("rarity", clustering_type="single_cluster"), packing(), layers()]
BAD = [
    (lengths(schedule_type=None), "curriculum_learning: schedule_type is missing"),
    (lengths(schedule_config={}), "needs schedule_config.total_curriculum_step"),
    (lengths(max_difficulty=0), '"fixed_linear" needs max_difficulty'),
    (lengths(min_difficulty=65), "0 <= minimum <= maximum, got 65 and 64"),
    (
        lengths(min_difficulty=4, schedule_config={"total_curriculum_step": 100, "difficulty_step": 8}),
        r"the first step would have sequences of 0 tokens \(rounded down to a multiple of difficulty_step\)",
    ),
    (lengths(schedule_type="fixed_discrete"), "needs schedule_config.difficulty"),
    (
        lengths(schedule_type="fixed_discrete", schedule_config={"difficulty": [8, 64], "max_step": [1, 2]}),
        "2 difficulties need 1 steps, got 2",
    ),
    (
        lengths(schedule_type="fixed_discrete", schedule_config={"difficulty": [4, 64], "max_step": [1]}),
        r"difficulties \[4\] are not between min_difficulty 8 and max_difficulty 64",
    ),
    (sampling(curriculum_learning={"enabled": True}), "curriculum_metrics names no metric"),
    (metric(schedule_type=None), r"curriculum_metrics\.seqlen: schedule_type is missing"),
    (metric("rarity"), r"curriculum_metrics\.rarity: index_to_sample_path is missing.*DataAnalyzer"),
    (metric("rarity", index_to_sample_path="s.npy"), "index_to_metric_path is missing"),
    (packing(max_tokens=0), "dynamic_batching: max_tokens is missing. Set max_tokens to what"),
    (packing(min_batch_size=4, max_batch_size=2), r"max_batch_size \(2; 0 is no limit\) at least min_batch_size"),
    (layers(random_ltd_layer_id=[]), "total_layer_num and random_ltd_layer_id are needed"),
    (layers(random_ltd_layer_id=[1, 4]), "must be different numbers below total_layer_num = 4"),
    (layers(random_ltd_layer_id=[1, 1]), "must be different numbers"),
    (layers(random_ltd_layer_num=3), "random_ltd_layer_num = 3, and random_ltd_layer_id names 2"),
    (layers(random_ltd_schedule={"min_value": 8}), "max_value and schedule_config.require_steps are needed"),
    (
        layers(
            random_ltd_schedule={
                "min_value": 8,
                "max_value": 64,
                "schedule_config": {"require_steps": 9, "seq_per_step": 16},
            }
        ),
        "sequences of 0 tokens",
    ),
]


@pytest.mark.parametrize("source", GOOD)
def test_what_is_complete_passes(source: dict[str, Any]) -> None:
    assert violations(load({"train_batch_size": 1, **source})) == []


@pytest.mark.parametrize(("source", "says"), BAD)
def test_what_is_missing_or_disagrees_is_refused(source: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        resolve(load({"train_batch_size": 1, **source}), Facts(world_size=1, replicas=1))


def test_a_section_that_is_off_breaks_no_rule() -> None:
    for source, _ in BAD:
        (name, section), *_ = source.items()
        off = {name: {**section, "enabled": False}}
        assert violations(load({"train_batch_size": 1, **off})) == []


def test_two_sections_that_both_choose_the_samples_exclude_each_other() -> None:
    both = {**metric()["data_efficiency"]["data_sampling"], **packing()["data_efficiency"]["data_sampling"]}
    (problem,) = violations(
        load({"train_batch_size": 1, "data_efficiency": {"enabled": True, "data_sampling": both}})
    )
    assert "are both on" in problem.reason
