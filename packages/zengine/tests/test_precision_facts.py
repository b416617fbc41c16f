"""Precision getters of an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zengine

ON = {"enabled": True}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def answers(section: dict[str, Any]) -> dict[str, Any]:
    engine, *_ = zengine.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1, **section})
    names = (
        *("fp16_enabled", "bfloat16_enabled", "fp16_auto_cast", "amp_enabled", "torch_autocast_enabled"),
        *("fp16_master_weights_and_gradients", "bf16_master_weights_and_gradients", "bf16_optimizer_states"),
    )
    found = {name for name in names if getattr(engine, name)()}
    values = engine.get_data_types(), engine.communication_data_type, engine.torch_autocast_dtype()
    engine.close()
    return {"yes": found, "values": values, "modules": engine.torch_autocast_lower_precision_safe_modules()}


@pytest.mark.parametrize(
    ("section", "yes", "values"),
    [
        ({}, set(), ((F32, F32), F32, None)),
        ({"fp16": {**ON, "auto_cast": True}}, {"fp16_enabled", "fp16_auto_cast"}, ((F16, F32), F16, None)),
        (
            {"bf16": {**ON, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
            {"bfloat16_enabled", "bf16_master_weights_and_gradients", "bf16_optimizer_states"},
            ((BF16, BF16), BF16, None),
        ),
        (
            {"fp16": {**ON, "fp16_master_weights_and_grads": True}, "communication_data_type": "fp32"},
            {"fp16_enabled", "fp16_master_weights_and_gradients"},
            ((F16, F16), F32, None),
        ),
        ({"amp": ON}, {"amp_enabled", "torch_autocast_enabled"}, ((F32, F32), F32, F16)),
        ({"torch_autocast": ON}, {"torch_autocast_enabled"}, ((F32, F32), F32, BF16)),
    ],
)
def test_an_engine_answers_as_its_config_says(section: dict[str, Any], yes: set[str], values: Any) -> None:
    found = answers(section)
    assert (found["yes"], found["values"]) == (yes, values)
    assert ("torch.nn.Linear" in found["modules"]) == ("torch_autocast_enabled" in yes)


@pytest.mark.parametrize("dtype", [torch.float64, F16])
def test_without_a_section_the_data_types_are_the_models(dtype: torch.dtype) -> None:
    engine, *_ = zengine.initialize(model=nn.Linear(2, 2).to(dtype), config={"train_batch_size": 1})
    assert (engine.get_data_types(), engine.communication_data_type) == ((dtype, dtype), dtype)
    assert not engine.fp16_enabled()
    engine.close()


@pytest.mark.parametrize(
    ("section", "configured", "current"),
    [
        ({}, 0.0, 1.0),
        ({"fp16": {**ON, "initial_scale_power": 4}}, 0.0, 16.0),
        ({"fp16": {**ON, "loss_scale": 8}}, 8.0, 8.0),
    ],
)
def test_loss_scale_is_a_method_that_returns_the_configs_constant(section, configured, current) -> None:
    engine, *_ = zengine.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1, **section})
    assert (engine.loss_scale(), engine.current_loss_scale) == (configured, current)
    engine.close()
