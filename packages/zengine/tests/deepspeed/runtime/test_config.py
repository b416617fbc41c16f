"""A config that can be looked at before there is an engine."""

from __future__ import annotations

import pytest

import zoptim
from zengine.deepspeed import DeepSpeedConfig, DeepSpeedConfigError
from zengine.deepspeed.runtime import config, constants, lr_schedules


def test_its_numbers_are_resolved_for_the_ranks_that_there_are(capsys):
    found = DeepSpeedConfig(
        {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 2},
        }
    )
    assert (found.train_batch_size, found.train_micro_batch_size_per_gpu) == (8, 4)
    assert (found.optimizer_name, found.scheduler_name, found.zero_optimization_stage) == ("adamw", None, 2)
    found.print()
    assert "zero_optimization.stage" in capsys.readouterr().out
    with pytest.raises(DeepSpeedConfigError, match="train_batch_siz"):
        DeepSpeedConfig({"train_batch_siz": 8})


def test_names_of_optimizers_and_keys_are_those_of_the_config():
    import torch

    params = [torch.nn.Parameter(torch.ones(2, 2))]
    for name in config.DEEPSPEED_OPTIMIZERS:
        given = [("w", params[0])] if name == "muon" else params
        assert isinstance(zoptim.make_optimizer(name, given, {"lr": 0.1}), torch.optim.Optimizer)
    keys = {
        constants.TRAIN_BATCH_SIZE: 4,
        constants.GRADIENT_CLIPPING: 1.0,
        constants.ZERO_OPTIMIZATION: {"stage": 1},
    }
    assert DeepSpeedConfig(keys).gradient_clipping == 1.0


def test_names_of_schedules_build_them():
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    options = {"OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_momentum": False}}
    options |= {key: {"total_num_steps": 2000} for key in ("WarmupDecayLR", "WarmupCosineLR")}
    for name in lr_schedules.VALID_LR_SCHEDULES:
        made = zoptim.make_schedule(name, optimizer, options.get(name, {}))
        assert type(made) is getattr(lr_schedules, name)
