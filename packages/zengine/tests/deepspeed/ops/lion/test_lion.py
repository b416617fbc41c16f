"""Lion's classes keep what they say."""

from __future__ import annotations

import pytest
import torch

from zengine.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion


@pytest.mark.parametrize(("make", "dtype"), [(FusedLion, torch.float32), (DeepSpeedCPULion, torch.float32)])
def test_the_momentum_is_in_float32(make, dtype):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = make([weight], lr=0.5)
    weight.grad = torch.ones(4)
    optimizer.step()
    assert torch.equal(weight.detach(), torch.full((4,), 0.5))
    assert optimizer.state[weight]["exp_avg"].dtype == dtype


def test_or_in_the_parameters_dtype_when_asked():
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = DeepSpeedCPULion([weight], fp32_optimizer_states=False)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].dtype == torch.bfloat16
