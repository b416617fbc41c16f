from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from zoptim.rules.elementwise import AdamMoments, adagrad_rule, adam_rule, adamw_rule, lamb_rule, lion_rule, sgd_rule


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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.1, "weight_decay": 0.2, "maximize": True},
        {"lr": 0.5, "lr_decay": 0.3, "initial_accumulator_value": 0.7, "eps": 1e-3},
    ],
    ids=str,
)
def test_ten_steps_of_adagrad_follow_torch_in_float64(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    theirs = torch.randn(9, generator=generator, dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.Adagrad([theirs], **options)
    rule_options = {key: value for key, value in options.items() if key != "initial_accumulator_value"}
    ours = theirs.detach().clone()
    total = torch.full_like(ours, options.get("initial_accumulator_value", 0.0))
    for step in range(10):
        grad = torch.randn(9, generator=generator, dtype=torch.float64) * 10.0 ** (step % 3 - 1)
        theirs.grad = grad.clone()
        optimizer.step()
        ours, total = adagrad_rule(ours, grad, total, step=step, **rule_options)
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(total, optimizer.state[theirs]["sum"], rtol=1e-13, atol=0)


def test_two_steps_of_lion_by_hand() -> None:
    """The step has the sign of the fast mix; the moment follows the slow one."""
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.5, 0.75), "weight_decay": 0.2}
    param, mean = lion_rule(tensor(2.0, 2.0, 2.0), tensor(-4.0, 4.0, 0.0), tensor(1.0, 1.0, 0.0), **options)
    assert param.tolist() == pytest.approx([2.0 * 0.98 + 0.1, 2.0 * 0.98 - 0.1, 2.0 * 0.98])
    assert mean.tolist() == pytest.approx([-0.25, 1.75, 0.0])
    param, mean = lion_rule(param, tensor(0.1, -1.5, 1e-12), mean, **options)
    expected = [2.06 * 0.98 + 0.1, 1.86 * 0.98 - 0.1, 1.96 * 0.98 - 0.1]  # mixes -0.075, 0.125 and positive
    assert param.tolist() == pytest.approx(expected)


def lamb_by_the_paper(param: list[float], grads: list[list[float]], o: dict[str, Any]) -> list[float]:
    """You et al. 2020, algorithm 2, in plain numbers, with the bounds of DeepSpeed."""
    b1, b2 = o["betas"]
    mean, square = [0.0] * len(param), [0.0] * len(param)
    for t, grad in enumerate(grads, start=1):
        mean = [b1 * m + (1 - b1) * g for m, g in zip(mean, grad)]
        square = [b2 * v + (1 - b2) * g * g for v, g in zip(square, grad)]
        c1, c2 = (1 - b1**t, 1 - b2**t) if o["bias_correction"] else (1.0, 1.0)
        if o["eps_inside_sqrt"]:
            roots = [math.sqrt(v / c2 + o["eps"]) for v in square]
        else:
            roots = [math.sqrt(v / c2) + o["eps"] for v in square]
        direction = [m / c1 / r + o["weight_decay"] * p for m, r, p in zip(mean, roots, param)]
        norms = math.hypot(*param), math.hypot(*direction)
        ratio = min(max(norms[0] / norms[1], o["min_coeff"]), o["max_coeff"]) if all(norms) else 1.0
        param = [p - o["lr"] * ratio * u for p, u in zip(param, direction)]
    return param


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("eps_inside_sqrt", [True, False])
@pytest.mark.parametrize(
    "bounds", [(0.01, 10.0), (0.9, 10.0), (0.01, 0.05)], ids=["free", "from below", "from above"]
)
def test_five_steps_of_lamb_follow_the_paper(
    bias_correction: bool, eps_inside_sqrt: bool, bounds: tuple[float, float]
) -> None:
    options = {
        "lr": 0.05,
        "betas": (0.8, 0.9),
        "eps": 1e-2,
        "weight_decay": 0.1,
        "bias_correction": bias_correction,
        "eps_inside_sqrt": eps_inside_sqrt,
        "min_coeff": bounds[0],
        "max_coeff": bounds[1],
    }
    start, grads = (
        [0.3, -0.1, 0.2],
        [[1.0, -2.0, 0.1], [0.0, 3.0, -0.5], [2.0, 2.0, 2.0], [-1.0, 0, 4.0], [1, 1, 1.0]],
    )
    param, memory = tensor(*start), AdamMoments.zeros(tensor(*start))
    for grad in grads:
        param, memory = lamb_rule(param, tensor(*grad), memory, **options)
    assert param.tolist() == pytest.approx(lamb_by_the_paper(start, grads, options), rel=1e-12)
    assert memory.step == 5


@pytest.mark.parametrize(("param", "grad"), [(0.0, 2.0), (3.0, 0.0)], ids=["zero weights", "zero direction"])
def test_the_trust_ratio_of_lamb_is_one_where_a_norm_is_zero(param: float, grad: float) -> None:
    new, _ = lamb_rule(tensor(param), tensor(grad), AdamMoments.zeros(tensor(0.0)), lr=0.1, eps=0.0 if grad else 1.0)
    assert new.item() == pytest.approx(param - 0.1 * (grad != 0))


def test_the_step_of_lamb_is_proportional_to_the_weights() -> None:
    """With the trust ratio inside its bounds, weights of twice the size move twice as far."""
    memory = AdamMoments.zeros(tensor(0.0, 0.0))
    moved = [
        lamb_rule(size * tensor(1.0, 2.0), tensor(3.0, 1.0), memory, lr=0.1)[0] - size * tensor(1.0, 2.0)
        for size in (1.0, 2.0)
    ]
    torch.testing.assert_close(moved[1], 2 * moved[0])


def call(rule: Any, param: torch.Tensor, grad: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Any]:
    """Call any of the rules, with zero moments."""
    zeros = torch.zeros_like(param)
    memory = zeros if rule in (adagrad_rule, lion_rule) else AdamMoments.zeros(param)
    result: tuple[torch.Tensor, Any] = rule(param, grad, memory, **options)
    return result


@pytest.mark.parametrize("rule", [adam_rule, adamw_rule, adagrad_rule, lion_rule, lamb_rule])
def test_maximize_is_the_gradient_turned_round(rule: Any) -> None:
    up, _ = call(rule, tensor(1.0), tensor(2.0), maximize=True, weight_decay=0.1)
    down, _ = call(rule, tensor(1.0), tensor(-2.0), weight_decay=0.1)
    assert torch.equal(up, down)


@pytest.mark.parametrize(("rule", "lr"), [(adagrad_rule, 0.5), (lion_rule, 0.01), (lamb_rule, 0.01)])
def test_training_a_quadratic_converges(rule: Any, lr: float) -> None:
    """The lr decays to 0: Lion's steps have one size, and it would circle the minimum forever."""
    param, memory = tensor(3.0, -2.0), torch.zeros(2, dtype=torch.float64)
    if rule is lamb_rule:
        memory = AdamMoments.zeros(param)  # type: ignore[assignment]
    for k in range(1000):
        param, memory = rule(param, 2 * (param - 1), memory, lr=lr * (1 - k / 1000))
    assert (param - 1).abs().max() < 0.05


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", [adagrad_rule, lion_rule, lamb_rule])
def test_the_other_rules_keep_the_dtype_and_write_nothing_in_place(rule: Any, dtype: torch.dtype) -> None:
    param, grad = torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype)
    new, after = call(rule, param, grad, weight_decay=0.1)
    assert new.dtype == dtype
    assert (after.exp_avg if rule is lamb_rule else after).dtype == dtype
    assert torch.equal(param, torch.ones(3, dtype=dtype))
    assert torch.equal(grad, torch.ones(3, dtype=dtype))


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
