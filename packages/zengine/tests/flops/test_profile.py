"""Profile as a value."""

from __future__ import annotations

import pytest

from zengine.flops.profile import FlopsProfile, ModuleCost


def test_the_numbers_of_a_module_follow_from_each_other() -> None:
    cost = ModuleCost(path="blocks.0.mlp", kind="MLP", params=3, flops=2_000, ms=0.5, calls=1)
    assert (cost.depth, cost.macs, cost.flops_per_s) == (3, 1_000, 4e6)
    assert ModuleCost(path="", kind="GPT", params=3).flops_per_s == 0
    assert ModuleCost(path="", kind="GPT", params=3).depth == 0


def test_a_step_by_the_formula_counts_what_is_recomputed() -> None:
    model = ModuleCost(path="", kind="GPT", params=3, flops=10)
    assert FlopsProfile(modules=(model,)).formula_flops == 30
    assert FlopsProfile(modules=(model,), recompute_factor=1.0).formula_flops == 40


def test_other_json_is_refused() -> None:
    for fields in ({}, {"modules": []}, {"modules": [{"path": ""}]}, {"modules": 3}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            FlopsProfile.from_json(fields)
