"""Adagrad's accumulator, in the precision that was asked for."""

from __future__ import annotations

import pytest
import torch

from zengine.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad


@pytest.mark.parametrize(("in_fp32", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_the_sum_of_squares_is_kept_as_it_was_asked_for(in_fp32: bool, dtype: torch.dtype):
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = DeepSpeedCPUAdagrad([weight], lr=0.5, fp32_optimizer_states=in_fp32)
    weight.grad = torch.full_like(weight, 2.0)
    optimizer.step()
    assert optimizer.state[weight]["sum"].dtype == dtype
    assert torch.allclose(weight.detach(), torch.full_like(weight, 0.5))
