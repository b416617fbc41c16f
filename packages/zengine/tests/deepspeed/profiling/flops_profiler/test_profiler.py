"""Texts of amounts, with the values of DeepSpeed 0.19.8; and a model whose operations it has counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
