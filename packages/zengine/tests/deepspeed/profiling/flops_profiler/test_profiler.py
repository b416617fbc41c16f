"""Texts of amounts, with the values of DeepSpeed 0.19.8; and a model whose operations it has counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import zengine.deepspeed as deepspeed
from zengine.deepspeed.profiling.flops_profiler import get_model_profile, profiler


def test_texts_are_deepspeeds():
    amounts = (0, 5, 1234, 1.5e6, 2.345e9, 7e15, 0.5, 3e-6)
    assert [profiler.number_to_string(amount) for amount in amounts] == [
        *("0 ", "5 ", "1.23 K", "1.5 M", "2.35 G", "7000 T", "500 m", "3 u")
    ]
    assert profiler.macs_to_string(1234567, units="K", precision=3) == "1234.57 KMACs"
    assert profiler.flops_to_string(1234) == "1.23 KFLOPS"
    assert profiler.bytes_to_string(1234) == "1.23 KB"
    assert (profiler.params_to_string(2.345e9), profiler.params_to_string(999)) == ("2.35 B", "999")
    assert profiler.params_to_string(2.345e9, units="B") == "2.35 B"
    assert profiler.duration_to_string(0.0012) == "1.2 ms"


def test_a_convolutional_model_is_counted_as_in_deepspeed():
    """LeNet-5: 845778 FLOPs a sample in DeepSpeed, whose suite allows 5 % as well."""
    convolutions = nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Conv2d(16, 120, 5), nn.Tanh(), nn.Flatten(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10)),
    )
    flops, macs, params = get_model_profile(convolutions, (4, 1, 32, 32), as_string=False, print_profile=False)
    assert flops / 4 == pytest.approx(845778, rel=0.05)
    assert macs / 4 == pytest.approx(416520, rel=0.05)
    assert params == 61706
    assert torch.is_grad_enabled()


def test_the_engine_has_the_profiler_of_its_config(tmp_path: Path):
    """As DeepSpeed's suite reads it: of a layer of 10 x 10 with a bias, 200 FLOPs and 110 parameters."""
    section = {"enabled": True, "profile_step": 1, "output_file": str(tmp_path / "flops.txt")}
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {}}, "flops_profiler": section}
    engine = deepspeed.initialize(model=nn.Linear(10, 10), config=config)[0]
    assert engine.flops_profiler.flops == 0
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 10)).square().mean())
        engine.step()
    assert (engine.flops_profiler.flops, engine.flops_profiler.macs, engine.flops_profiler.params) == (200, 100, 110)
    engine.close()
    plain = deepspeed.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1})[0]
    assert plain.flops_profiler is None
    plain.close()
