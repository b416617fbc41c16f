"""DeepSpeedCPUAdam by subgroup: one state for the flat parameter of the moment; and a step that is taken back."""

from __future__ import annotations

import pytest
import torch

from zengine.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam


def flat(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    torch.manual_seed(3)
    return torch.nn.Parameter(torch.randn(64).to(dtype))


@pytest.mark.parametrize("adamw", [True, False])
def test_a_subgroup_steps_as_the_optimizer_does(adamw: bool):
    one, other = flat(), flat()
    plain = DeepSpeedCPUAdam([one], lr=0.1, weight_decay=0.1, adamw_mode=adamw)
    grouped = DeepSpeedCPUAdam([other], lr=0.1, weight_decay=0.1, adamw_mode=adamw)
    for _ in range(3):
        one.grad = torch.randn(64)
        other.grad = one.grad.clone()
        plain.step()
        assert grouped.step_subgroup(7, closure=lambda: 5.0) == 5.0
    torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)
    assert grouped.state[7]["step"] == 3  # type: ignore[index]
    torch.testing.assert_close(grouped.state[7]["exp_avg_sq"], plain.state[one]["exp_avg_sq"])  # type: ignore[index]


@pytest.mark.parametrize("adamw", [True, False])
def test_a_rollback_undoes_the_last_step(adamw: bool):
    param = flat()
    optimizer = DeepSpeedCPUAdam([param], lr=0.1, weight_decay=0.1, adamw_mode=adamw)
    with pytest.raises(RuntimeError, match="Cannot rollback optimizer state for sub_group_id 0 as it has not been"):
        optimizer.rollback_subgroup(0)
    states = []
    for _ in range(2):
        param.grad = torch.randn(64)
        state = optimizer.state.get(0)  # type: ignore[call-overload]
        states.append((param.detach().clone(), {} if not state else {k: v + 0 for k, v in state.items()}))
        optimizer.step_subgroup(0)
    optimizer.rollback_subgroup(0)
    weight, before = states[1]
    torch.testing.assert_close(param.detach(), weight, rtol=1e-5, atol=1e-5)
    for name, value in before.items():
        torch.testing.assert_close(optimizer.state[0][name], value, rtol=1e-3, atol=1e-6)  # type: ignore[index]
    optimizer.state[0]["step"] = 0  # type: ignore[index]
    with pytest.raises(RuntimeError, match="Cannot rollback sub_group_id 0: step count is 0"):
        optimizer.rollback_subgroup(0)


def test_state_may_have_the_dtype_of_the_parameter():
    param = flat(torch.bfloat16)
    param.grad = torch.ones(64, dtype=torch.bfloat16)
    small = DeepSpeedCPUAdam([param], fp32_optimizer_states=False)
    small.step_subgroup(1)
    assert small.state[1]["exp_avg"].dtype == torch.bfloat16  # type: ignore[index]
    assert DeepSpeedCPUAdam([param]).adam_w_mode
    assert not FusedAdam([param], adam_w_mode=False).adam_w_mode
