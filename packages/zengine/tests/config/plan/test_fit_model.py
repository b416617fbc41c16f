"""Plans of models whose dtype no section decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zengine.config import ConfigError, Facts, Plan, load, resolve
from zengine.config.plan.fit_model import adapt_to_model
from zprecision import DynamicScaling, Unscaled

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


def plan_of(stage: int, **source: Any) -> Plan:
    config = {"train_batch_size": 2, "zero_optimization": {"stage": stage}, **source}
    return resolve(load(config), Facts(world_size=2, replicas=2))


@pytest.mark.parametrize("stage", range(4))
def test_wide_weights_change_nothing_and_are_their_own_masters(stage: int) -> None:
    plan = plan_of(stage)
    assert adapt_to_model(plan, {F64: "a", F32: "b"}) == (plan, "")
    for dtype in (F64, F32):
        assert plan.zero.master_for(dtype) == plan.zero.accumulate_for(dtype) == dtype


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_at_stage_0_weights_of_16_bits_are_trained_as_they_are(dtype: torch.dtype) -> None:
    plan, notice = adapt_to_model(plan_of(0), {dtype: "a"})
    assert plan.zero.master_for(dtype) == plan.zero.accumulate_for(dtype) == dtype
    assert plan.scaling == Unscaled()
    assert "without float32 masters or a loss scale, as in plain torch" in notice


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_from_stage_1_on_they_have_masters_and_float16_a_loss_scale(stage: int) -> None:
    plan, notice = adapt_to_model(plan_of(stage), {BF16: "a"})
    assert plan.zero.master_for(BF16) == plan.zero.accumulate_for(BF16) == F32
    assert plan.scaling == Unscaled()
    assert "they get float32 masters, as in DeepSpeed" in notice
    plan, notice = adapt_to_model(plan_of(stage), {F16: "a", F32: "b"})
    assert plan.zero.master_for(F16) == F32
    assert plan.scaling == DynamicScaling()
    assert "float32 masters and a dynamic loss scale, as in DeepSpeed" in notice
    assert '"fp16": {"enabled": true}' in notice


def test_a_config_that_says_what_weights_are_is_left_alone() -> None:
    plan = plan_of(2, data_types={"param_dtype": "fp32"})
    assert plan.precision.param == F32
    assert adapt_to_model(plan, {F16: "a"}) == (plan, "")
    asked = plan_of(2, data_types={"param_dtype": "fp64"})
    assert (asked.precision.param, asked.precision.master, asked.precision.accumulate) == (F64, F64, F64)


def test_a_loss_scale_that_was_chosen_stays() -> None:
    chosen = plan_of(2, torch_autocast={"enabled": True, "dtype": "fp16", "loss_scale": 8})
    assert adapt_to_model(chosen, {F16: "a"})[0].scaling == chosen.scaling


def test_sums_that_the_optimizer_cannot_take_are_refused() -> None:
    plan = plan_of(0, data_types={"grad_accum_dtype": "fp32"})
    with pytest.raises(ConfigError, match=r"grad_accum_dtype.*float32.*: layer.w is float16 and has no master"):
        adapt_to_model(plan, {F16: "layer.w"})
    assert adapt_to_model(plan, {BF16: "layer.w"})[0] == plan
    adapt_to_model(plan_of(1, data_types={"grad_accum_dtype": "fp32"}), {F16: "layer.w"})
