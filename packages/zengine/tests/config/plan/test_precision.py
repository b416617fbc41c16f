"""Dtypes, scaling, autocast and the optimizer's states from a config."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zengine.config import Facts, Plan, load, resolve
from zprecision import DynamicScaling, KeepInFp32, Precision, StaticScaling, Unscaled

ON = {"enabled": True}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CLASSES = ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d")


def plan_of(source: dict[str, Any], bf16_is_faster: bool = False) -> Plan:
    facts = Facts(world_size=2, replicas=2, bf16_is_faster=bf16_is_faster)
    return resolve(load({"train_batch_size": 2, "config_version": "zengine-0.2", **source}), facts)


@pytest.mark.parametrize(
    ("section", "dtype", "scaling"),
    [
        ({"torch_autocast": ON}, BF16, Unscaled()),
        ({"torch_autocast": {**ON, "dtype": "bf16"}}, BF16, Unscaled()),
        ({"torch_autocast": {**ON, "dtype": "fp16"}}, F16, DynamicScaling()),
        ({"torch_autocast": {**ON, "dtype": "torch.float16", "loss_scale": 8}}, F16, StaticScaling(8.0)),
        ({"amp": {**ON, "opt_level": "O0"}}, F32, Unscaled()),
        ({"amp": ON}, F16, DynamicScaling()),
        ({"amp": {**ON, "opt_level": "o2", "loss_scale": 128.0}}, F16, StaticScaling(128.0)),
        ({}, F32, Unscaled()),
    ],
)
def test_autocast_leaves_weights_in_float32_and_scales_for_float16(section: Any, dtype: Any, scaling: Any) -> None:
    plan = plan_of(section)
    assert (plan.numerics.autocast, plan.scaling) == (dtype, scaling)
    assert plan.precision == Precision()
    assert (plan.zero.master_for(F32), plan.zero.accumulate_for(F32)) == (F32, F32)
    narrow = (None, ()) if dtype == F32 else (dtype, CLASSES)
    assert (plan.zero.narrow_dtype, plan.zero.narrow_classes) == narrow


def test_the_wire_is_what_communication_data_type_says_else_the_safe_modules_narrow_one() -> None:
    autocast = {"torch_autocast": {**ON, "lower_precision_safe_modules": ["my.Layer"]}}
    assert plan_of(autocast).zero.narrow_classes == ("my.Layer",)
    assert plan_of({"torch_autocast": {**ON, "lower_precision_safe_modules": []}}).zero.narrow_dtype is None
    said = plan_of({**autocast, "communication_data_type": "fp32"}).zero
    assert (said.reduce_dtype, said.narrow_dtype) == (F32, None)


@pytest.mark.parametrize(
    ("amp", "notice"),
    [
        ({}, 'dict: "amp" with opt_level O1 is read as "torch_autocast": {"enabled": true, "dtype": "fp16"} with '
             "dynamic loss scaling, which is equivalent to O1"),
        ({"opt_level": "O0"}, 'dict: "amp" with opt_level O0 has no effect here: training in float32'),
        ({"opt_level": "O3", "loss_scale": 1.0},
         'dict: "amp" with opt_level O3 is read as "torch_autocast": {"enabled": true, "dtype": "fp16"} with a loss '
         "scale of 1: weights stay float32, whereas O3 had float16 weights and no masters. For those write "
         '"fp16": {"enabled": true, "fp16_master_weights_and_grads": true} in place of "amp"'),
    ],
)  # fmt: skip
def test_what_is_made_of_amp_is_said_exactly(amp: dict[str, Any], notice: str) -> None:
    assert plan_of({"amp": {**ON, **amp}}).notices == (notice,)


def test_apexes_other_options_are_known_and_said_to_do_nothing() -> None:
    (notice, _) = plan_of({"amp": {**ON, "keep_batchnorm_fp32": False, "verbosity": 0, "num_losses": 2}}).notices[::2]
    assert "amp.keep_batchnorm_fp32 has no effect here: weights are always float32" in notice


@pytest.mark.parametrize(
    ("section", "dtypes"),
    [
        ({"bf16": ON}, (BF16, F32, F32)),
        ({"bf16": {**ON, "bf16_master_weights_and_grads": True}}, (BF16, BF16, BF16)),
        ({"fp16": {**ON, "fp16_master_weights_and_grads": True}}, (F16, F16, F16)),
        ({"bf16": {**ON, "bf16_master_weights_and_grads": True}, "data_types": {"grad_accum_dtype": "fp32"}},
         (BF16, BF16, F32)),
        ({"data_types": {"param_dtype": "bf16"}}, (BF16, F32, F32)),
        ({"bf16": {"enabled": "auto", "bf16_master_weights_and_grads": True}}, (F32, F32, F32)),
    ],
)  # fmt: skip
def test_masters_and_sums_are_narrow_only_when_asked(section: dict[str, Any], dtypes: tuple[Any, ...]) -> None:
    plan = plan_of(section)
    assert (plan.precision.param, plan.zero.master_dtype, plan.zero.accumulate_dtype) == dtypes


def test_float16_weights_are_scaled_for_whoever_asks_for_them() -> None:
    assert plan_of({"data_types": {"param_dtype": "fp16"}}).scaling == DynamicScaling()


@pytest.mark.parametrize(
    ("optimizer", "states", "expected"),
    [
        ({"type": "AdamW"}, False, {"state_dtype": "fp32"}),
        ({"type": "AdamW"}, True, {"state_dtype": "bf16"}),
        ({"type": "Lion", "params": {"state_dtype": "8bit"}}, False, {"state_dtype": "8bit"}),
        ({"type": "Adam", "params": {"fp32_optimizer_states": False}}, True, {"fp32_optimizer_states": False}),
        ({"type": "Adam", "params": {"torch_adam": True}}, False, {"torch_adam": True}),
        ({"type": "RMSprop"}, True, {}),
    ],
)
def test_states_beside_narrow_masters_are_float32_unless_told(optimizer: Any, states: bool, expected: Any) -> None:
    section = {**ON, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": states}
    assert plan_of({"bf16": section, "optimizer": optimizer}).optimizer.params == expected
    assert plan_of({"bf16": ON, "optimizer": optimizer}).optimizer.params == optimizer.get("params", {})


def test_what_narrow_masters_cost_is_said() -> None:
    def notices(name: str, section: str) -> tuple[str, ...]:
        return plan_of(
            {section: {**ON, f"{section}_master_weights_and_grads": True}, "optimizer": {"type": name}}
        ).notices

    assert notices("AdamW", "bf16") == ()  # rounds stochastically
    (rounded,) = notices("AdamW", "fp16")
    assert rounded.startswith("masters in float16 are rounded to nearest by AdamW: an update below 1/2048 of its")
    keeps, rounded = notices("RMSprop", "bf16")
    assert keeps == "RMSprop has no option state_dtype: its states have the dtype of the masters, bfloat16"
    assert "an update below 1/256 of its weight is lost" in rounded
    follows = {"optimizer": {"type": "Adam", "params": {"fp32_optimizer_states": False}}}
    for section in ({}, {"bf16": ON}):
        assert plan_of({**section, **follows}).notices == (
            "dict: optimizer.params.fp32_optimizer_states = false has no effect here: it selects the dtype of the "
            'masters, which is float32. For smaller states write "state_dtype": "bf16"',
        )
    narrow = {"bf16": {**ON, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    assert plan_of({**narrow, **follows}).notices == ()
    auto = plan_of({"bf16": {"enabled": "auto", "bf16_master_weights_and_grads": True}}).notices
    assert "dict: bf16.bf16_master_weights_and_grads has no effect here: bf16.enabled resolves to float32" in auto


def test_the_copies_of_autocast_at_stage_3_are_told() -> None:
    zero = {"zero_optimization": {"stage": 3}}
    (notice,) = plan_of({"torch_autocast": ON, **zero}).notices
    assert notice.startswith(
        "dict: with torch_autocast at stage 3 every rank holds bfloat16 copies of all weights from"
    )
    assert "with amp at stage 3 every rank holds float16 copies" in plan_of({"amp": ON, **zero}).notices[1]
    assert plan_of({"torch_autocast": ON, "bf16": ON, **zero}).notices == ()
    assert plan_of({"torch_autocast": ON, "zero_optimization": {"stage": 2}}).notices == ()


def test_values_that_follow_from_another_section_say_so() -> None:
    masters = {"bf16": {**ON, "bf16_master_weights_and_grads": True}}
    low = plan_of({**masters, "optimizer": {"type": "AdamW"}}).origins
    assert low["optimizer.params.state_dtype"] == "derived"
    assert "optimizer.params.state_dtype" not in plan_of({**masters, "optimizer": {"type": "RMSprop"}}).origins
    assert low["data_types.param_dtype"] == low["data_types.grad_accum_dtype"] == "derived"
    amp = plan_of({"amp": ON, "data_types": {"grad_accum_dtype": "fp32"}}).origins
    assert amp["torch_autocast.enabled"] == amp["torch_autocast.dtype"] == "derived"
    assert (amp["data_types.param_dtype"], amp["data_types.grad_accum_dtype"]) == ("default", "dict")


def test_keys_of_autocast_that_others_decide_are_told() -> None:
    autocast = {**ON, "dtype": "bf16", "loss_scale": 128, "lower_precision_safe_modules": ["torch.nn.Linear"]}
    said = plan_of({"torch_autocast": autocast, "communication_data_type": "fp32"}).notices
    assert [notice.split()[1] for notice in said] == [
        "torch_autocast.loss_scale",
        "torch_autocast.lower_precision_safe_modules",
    ]
    assert not plan_of({"torch_autocast": {**autocast, "dtype": "fp16"}}).notices


def test_what_stays_wide_and_the_buffers_reach_the_precision() -> None:
    plan = plan_of({"bf16": ON, "data_types": {"keep_in_fp32_modules": ["norm"], "buffer_dtype": "fp32"}})
    assert plan.precision.keep == KeepInFp32(patterns=("norm",), as_listed=False)
    assert plan.precision.buffer == F32
    assert plan_of({}).precision.keep == KeepInFp32(as_listed=True)
    assert plan_of({"data_types": {"keep_in_fp32_modules": []}}).precision.keep == KeepInFp32(as_listed=False)
    (notice,) = plan_of({"torch_autocast": ON, "data_types": {"keep_in_fp32_modules": ["norm"]}}).notices
    assert notice.endswith("weights keep the dtype of the model, and torch.autocast decides for each operation")
    auto = plan_of({"bf16": {"enabled": "auto"}, "data_types": {"keep_in_fp32_modules": ["norm"]}}).notices
    assert "dict: data_types.keep_in_fp32_modules has no effect here: weights are float32 or wider" in auto


def test_beside_fp16_the_autocast_is_fp16_and_the_loss_scale_is_fp16s() -> None:
    both = {"fp16": {**ON, "loss_scale": 32}, "torch_autocast": {**ON, "loss_scale": 8}}
    plan = plan_of(both)
    assert (plan.numerics.autocast, plan.scaling) == (F16, StaticScaling(32.0))
    (notice,) = [notice for notice in plan.notices if "no effect" in notice]
    assert notice == "dict: torch_autocast.loss_scale has no effect here: fp16.loss_scale decides"
