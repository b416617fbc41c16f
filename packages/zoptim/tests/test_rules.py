from __future__ import annotations

import math

import pytest
import torch

from zoptim.rules import AdamMoments, adam_rule, adamw_rule, sgd_rule


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_one_step_of_adamw_by_hand() -> None:
    param, after = adamw_rule(
        tensor(2.0), tensor(-3.0), AdamMoments.zeros(tensor(0.0)), lr=0.1, eps=0.5, weight_decay=0.2
    )
    # m-hat = g and sqrt(v-hat) = |g| after one step.
    assert param.item() == pytest.approx(2.0 * (1 - 0.1 * 0.2) + 0.1 * 3.0 / 3.5)
    assert after.step == 1
    assert after.exp_avg.item() == pytest.approx(-0.3)
    assert after.exp_avg_sq.item() == pytest.approx(0.009)


def test_two_steps_of_adam_by_hand_put_the_decay_into_the_moments() -> None:
    memory = AdamMoments.zeros(tensor(0.0))
    param = tensor(1.0)
    for grad in (1.0, -2.0):
        param, memory = adam_rule(param, tensor(grad), memory, lr=0.1, betas=(0.5, 0.5), eps=1.0, weight_decay=0.5)
    first = 1.0 - 0.1 * 1.5 / (1.5 + 1.0)
    second_grad = -2.0 + 0.5 * first
    mean, square = (0.75 * 0.5 + 0.5 * second_grad) / 0.75, (1.125 * 0.5 + 0.5 * second_grad**2) / 0.75
    assert param.item() == pytest.approx(first - 0.1 * mean / (math.sqrt(square) + 1.0))


def test_without_bias_correction_the_moments_are_used_as_they_are() -> None:
    memory = AdamMoments.zeros(tensor(0.0))
    param, _ = adamw_rule(tensor(1.0), tensor(2.0), memory, lr=1.0, eps=0.0, weight_decay=0.0, bias_correction=False)
    assert param.item() == pytest.approx(1.0 - 0.2 / math.sqrt(0.004))


def test_amsgrad_never_forgets_the_largest_second_moment() -> None:
    memory = AdamMoments.zeros(tensor(0.0), amsgrad=True)
    for grad in (10.0, 0.0, 0.0):
        _, memory = adamw_rule(tensor(1.0), tensor(grad), memory)
    assert memory.max_exp_avg_sq is not None
    assert memory.max_exp_avg_sq.item() == pytest.approx(0.1)
    assert memory.exp_avg_sq.item() < 0.1


def test_sgd_by_hand_with_an_undampened_first_buffer() -> None:
    param, buffer = sgd_rule(tensor(1.0), tensor(2.0), None, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=1.0)
    assert (param.item(), buffer.item()) == pytest.approx((0.7, 3.0))
    param, buffer = sgd_rule(param, tensor(2.0), buffer, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=1.0)
    assert buffer.item() == pytest.approx(0.9 * 3.0 + 0.5 * 2.7)
    assert param.item() == pytest.approx(0.7 - 0.1 * buffer.item())


def test_nesterov_looks_ahead() -> None:
    param, _ = sgd_rule(tensor(1.0), tensor(1.0), tensor(2.0), lr=0.1, momentum=0.5, nesterov=True)
    assert param.item() == pytest.approx(1.0 - 0.1 * (1.0 + 0.5 * 2.0))


def test_plain_sgd_remembers_nothing() -> None:
    assert sgd_rule(tensor(1.0), tensor(1.0), None)[1] is None


@pytest.mark.parametrize("rule", [adam_rule, adamw_rule])
def test_maximize_is_the_gradient_turned_round(rule: object) -> None:
    memory = AdamMoments.zeros(tensor(0.0))
    up = rule(tensor(1.0), tensor(2.0), memory, maximize=True)  # type: ignore[operator]
    down = rule(tensor(1.0), tensor(-2.0), memory)  # type: ignore[operator]
    assert torch.equal(up[0], down[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rules_keep_the_dtype_and_write_nothing_in_place(dtype: torch.dtype) -> None:
    param, grad = torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype)
    memory = AdamMoments.zeros(param, amsgrad=True)
    new, after = adamw_rule(param, grad, memory)
    assert new.dtype == after.exp_avg.dtype == dtype
    moved, buffer = sgd_rule(param, grad, torch.ones(3, dtype=dtype), momentum=0.9)
    assert moved.dtype == dtype
    assert buffer is not None
    for tensor_ in (param, grad):
        assert torch.equal(tensor_, torch.ones(3, dtype=dtype))
    assert not memory.exp_avg.any()
