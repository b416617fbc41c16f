"""Rules of compression_training: what an enabled technique requires, with keys and remedies."""

from __future__ import annotations

from typing import Any

import pytest

from zengine.config import load, violations
from zengine.config.plan.techniques.compression import (
    compression_notices,
    enabled_techniques,
    forward_techniques,
    kept_of,
)


def told(section: dict[str, Any]) -> list[str]:
    return [str(problem) for problem in violations(load({"train_batch_size": 1, "compression_training": section}))]


def technique(shared: dict[str, Any], **params: Any) -> dict[str, Any]:
    groups = {"g": {"params": params, "modules": ["fc"]}} if params else {}
    return {"shared_parameters": {"enabled": True, **shared}, "different_groups": groups}


def test_a_technique_that_is_off_requires_nothing() -> None:
    section = {"head_pruning": {"shared_parameters": {"enabled": False}, "different_groups": {"g": {}}}}
    assert told(section) == []


@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        ({"row_pruning": technique({})}, "row_pruning.different_groups", "has no group"),
        (
            {"row_pruning": technique({}, dense_ratio=0)},
            "row_pruning.different_groups.g.params.dense_ratio",
            "must be above 0",
        ),
        (
            {"weight_quantization": technique({}, target_bits=4)},
            "weight_quantization.different_groups.g.params.start_bits",
            "start_bits must be given",
        ),
        (
            {"weight_quantization": technique({}, start_bits=4, target_bits=8)},
            "weight_quantization.different_groups.g.params.start_bits",
            "is below target_bits = 8",
        ),
        (
            {"weight_quantization": technique({}, format="int4")},
            "weight_quantization.different_groups.g.params.format",
            "quantize_weight_in_forward is false",
        ),
        (
            {"sparse_pruning": technique({"block_pattern": "4:4"}, dense_ratio=1)},
            "sparse_pruning.shared_parameters.block_pattern",
            "must keep at least 1 and less than all",
        ),
        (
            {"sparse_pruning": technique({"method": "topk", "follow_weights": True}, dense_ratio=0.5)},
            "sparse_pruning.shared_parameters.follow_weights",
            "topk chooses by scores",
        ),
        (
            {"layer_reduction": {"enabled": True, "module_name_prefix": "h"}},
            "layer_reduction.teacher_layer",
            "teacher_layer must be given",
        ),
    ],
)
def test_a_missing_or_wrong_key_is_named(section: dict[str, Any], key: str, words: str) -> None:
    (problem,) = told(section)
    assert f"compression_training.{key}" in problem
    assert words in problem


def test_rounding_after_updates_is_no_technique_of_forward() -> None:
    section = {"weight_quantization": technique({}, start_bits=8, target_bits=4)}
    found = load({"train_batch_size": 1, "compression_training": section}).settings.compression_training
    assert list(enabled_techniques(found)) == ["weight_quantization"]
    assert forward_techniques(found) == {}


def test_patterns_of_neighbours() -> None:
    assert [kept_of(text) for text in ("2:4", "4x1", "1:16")] == [(2, 4), None, (1, 16)]


def test_keys_of_rounding_after_updates_are_told_in_forward() -> None:
    def noticed(in_forward: bool, rounding: str, **params: Any) -> list[str]:
        shared = {"quantize_weight_in_forward": in_forward, "rounding": rounding}
        section = {"weight_quantization": technique(shared, start_bits=8, target_bits=4, **params)}
        return compression_notices(load({"train_batch_size": 1, "compression_training": section}))

    (notice,) = noticed(True, "stochastic", quantization_period=7)
    assert "weight_quantization.shared_parameters.rounding, " in notice
    assert "weight_quantization.different_groups.g.params.quantization_period have no effect here" in notice
    assert noticed(False, "stochastic", quantization_period=7) == []
    section = {
        "weight_quantization": technique(
            {"quantize_weight_in_forward": True, "quantize_verbose": True}, start_bits=8, target_bits=4
        )
    }
    (notice,) = compression_notices(load({"train_batch_size": 1, "compression_training": section}))
    assert "weight_quantization.shared_parameters.quantize_verbose has no effect here" in notice
    assert noticed(True, "nearest") == []
