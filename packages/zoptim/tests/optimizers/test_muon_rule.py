"""Muon's iteration against singular values, and its rule against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zoptim import muon_rule, orthogonalize


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def by_singular_values(matrix: Tensor, steps: int = 5) -> Tensor:
    """The oracle of the iteration: the quintic, applied to each singular value."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(steps):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    return left @ values.diag() @ right


# The iteration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 5), (5, 8), (16, 16), (1, 7), (7, 1), (100, 12)], ids=str)
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_the_iteration_is_a_quintic_of_the_singular_values(shape: tuple[int, int], method: str) -> None:
    matrix = random(*shape)
    torch.testing.assert_close(orthogonalize(matrix, 5, method), by_singular_values(matrix), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (128, 32), (32, 128)], ids=str)
def test_singular_values_come_near_one(shape: tuple[int, int], dtype: torch.dtype, method: str) -> None:
    slack = 0.0 if dtype is torch.float32 else 0.15
    for seed in range(4):
        values = torch.linalg.svdvals(orthogonalize(random(*shape, seed=seed, dtype=dtype), 5, method).float())
        assert values.max() < 1.21 + slack
        assert values.median() > 0.65 - slack


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_momentum_of_low_rank_stays_bounded(dtype: torch.dtype, method: str) -> None:
    """Momenta are nearly of low rank; rounding must not amplify the null directions."""
    matrix = (random(256, 4) @ random(4, 128, seed=1)).to(dtype)
    values = torch.linalg.svdvals(orthogonalize(matrix, 5, method).float())
    assert values.max() < 1.4
    assert bool((values[:4] > 0.6).all())


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_stacked_matrices_are_those_alone(method: str) -> None:
    stack = torch.stack([random(9, 6, seed=seed, dtype=torch.float32) for seed in range(5)])
    alone = torch.stack([orthogonalize(matrix, 5, method) for matrix in stack])
    torch.testing.assert_close(orthogonalize(stack, 5, method), alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_neither_size_nor_zero_upsets_the_iteration(method: str) -> None:
    matrix = random(6, 4, dtype=torch.float32)
    expected = orthogonalize(matrix, 5, method)
    for size in (1e-4, 1e15):
        torch.testing.assert_close(orthogonalize(size * matrix, 5, method), expected, rtol=1e-2, atol=1e-3)
    assert torch.equal(orthogonalize(torch.zeros(6, 4), 5, method), torch.zeros(6, 4))


# The rule ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(12, 5), (5, 12)], ids=str)
def test_ten_steps_of_the_rule_follow_torch(shape: tuple[int, int], nesterov: bool, adjust_lr: str) -> None:
    """torch iterates in bf16: weights agree to the noise of that, the momentum to rounding."""
    theirs = random(*shape, dtype=torch.float32).requires_grad_()
    options: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
    optimizer = torch.optim.Muon([theirs], **options, adjust_lr_fn=adjust_lr)
    ours, buffer = theirs.detach().clone(), torch.zeros(shape)
    for step in range(10):
        grad = random(*shape, seed=100 + step, dtype=torch.float32)
        theirs.grad = grad.clone()
        optimizer.step()
        ours, buffer = muon_rule(ours, grad, buffer, adjust_lr=adjust_lr, **options)
    torch.testing.assert_close(buffer, optimizer.state[theirs]["momentum_buffer"], rtol=1e-5, atol=1e-6)
    moved = (theirs.detach() - random(*shape, dtype=torch.float32)).norm()
    assert (ours - theirs.detach()).norm() < 0.02 * moved


def test_one_step_by_hand() -> None:
    param, grad, buffer = random(6, 3), random(6, 3, seed=1), random(6, 3, seed=2)
    new, after = muon_rule(param, grad, buffer, lr=0.1, momentum=0.75, weight_decay=0.2)
    mixed = 0.75 * buffer + 0.25 * grad
    torch.testing.assert_close(after, mixed)
    direction = by_singular_values(0.25 * grad + 0.75 * mixed)
    torch.testing.assert_close(new, param * 0.98 - 0.1 * 2**0.5 * direction, rtol=1e-5, atol=1e-6)


def test_maximize_is_the_gradient_turned_round_and_nothing_is_written() -> None:
    param, grad, buffer = random(6, 3), random(6, 3, seed=1), random(6, 3, seed=2)
    kept = [tensor.clone() for tensor in (param, grad, buffer)]
    up, down = muon_rule(param, grad, buffer, maximize=True), muon_rule(param, -grad, buffer)
    assert torch.equal(up[0], down[0])
    assert all(torch.equal(a, b) for a, b in zip((param, grad, buffer), kept))
