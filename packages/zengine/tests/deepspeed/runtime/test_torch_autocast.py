"""Marks of the parameters whose gradients are reduced in autocast's dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zengine.deepspeed as deepspeed
from zengine.deepspeed.runtime import torch_autocast as autocast


def make(**section: Any) -> Any:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    settings = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    return deepspeed.initialize(model=model, config={**settings, "torch_autocast": section})[0]


def test_parameters_of_safe_modules_are_marked():
    engine = make(enabled=True, dtype="bfloat16", lower_precision_safe_modules=["torch.nn.Linear"])
    linear, norm = engine.module
    assert autocast.get_comm_dtype(linear.weight) == autocast.get_autocast_dtype() == torch.bfloat16
    assert (autocast.has_comm_dtype(linear.bias), autocast.has_comm_dtype(norm.weight)) == (True, False)
    found = autocast.get_all_comm_dtypes(engine.module.parameters())
    assert autocast.sort_dtypes(found) == [torch.bfloat16, torch.float32]
    assert autocast.is_autocast_initialized()
    with autocast.autocast_if_enabled(engine):
        assert linear(torch.ones(1, 2)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="is no class of this model"):
        autocast.init_autocast_params(engine, torch.bfloat16, ["torch.nn.Linaer"])


def test_an_engine_without_autocast_switches_the_callers_off():
    engine = make(enabled=False, lower_precision_safe_modules=["torch.nn.Linear"])
    assert not any(map(autocast.has_comm_dtype, engine.module.parameters()))
    with torch.autocast("cpu", dtype=torch.bfloat16), autocast.autocast_if_enabled(engine):
        assert engine.module[0](torch.ones(1, 2)).dtype == torch.float32
