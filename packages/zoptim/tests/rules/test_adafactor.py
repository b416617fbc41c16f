from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from zoptim.rules.adafactor import AdafactorMoments, adafactor_rule

SHAPES = [(7,), (3, 5), (), (64,), (2, 3, 4, 5), (1, 9), (9, 1)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.05, "weight_decay": 0.1, "maximize": True},
    {"lr": 0.5, "d": 1.5, "beta2_decay": -0.5},
    {"lr": 0.1, "eps": (1e-6, 0.5)},
]


def grads_of(shape: tuple[int, ...], steps: int = 12) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [10.0 ** (k % 5 - 3) * torch.randn(shape, generator=generator, dtype=torch.float64) for k in range(steps)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_twelve_steps_follow_torch_in_float64(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    theirs = torch.linspace(-1, 2, math.prod(shape), dtype=torch.float64).reshape(shape).requires_grad_()
    ours, memory = theirs.detach().clone(), AdafactorMoments.zeros(theirs)
    optimizer = torch.optim.Adafactor([theirs], **options)
    for grad in grads_of(shape):
        theirs.grad = grad.clone()
        optimizer.step()
        ours, memory = adafactor_rule(ours, grad, memory, **options)
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)
    state = optimizer.state[theirs]
    assert memory.step == int(state["step"])
    for key in ("row_var", "col_var", "variance"):
        if key in state:
            torch.testing.assert_close(getattr(memory, key), state[key], rtol=1e-12, atol=0)
        else:
            assert getattr(memory, key) is None


def test_one_step_by_hand() -> None:
    """After one step the moments are the gradient's mean squares (rank one here), so the update is its sign."""
    rows, cols = torch.tensor([[1.0], [-2.0]]).double(), torch.tensor([[3.0, -1.0, 0.5]]).double()
    param = torch.full((2, 3), 4.0, dtype=torch.float64)
    new, memory = adafactor_rule(param, rows * cols, AdafactorMoments.zeros(param), lr=0.25, weight_decay=0.1)
    sign = (rows * cols).sign()
    torch.testing.assert_close(new, param * (1 - 0.25 * 0.1) - 0.25 * 4.0 * sign)  # the weights' own size is 4
    assert memory.row_var is not None
    torch.testing.assert_close(memory.row_var, rows.square() * cols.square().mean())


def test_a_matrix_is_remembered_in_rows_plus_columns() -> None:
    memory = AdafactorMoments.zeros(torch.zeros(30, 50))
    assert memory.row_var is not None
    assert memory.col_var is not None
    assert memory.row_var.numel() + memory.col_var.numel() == 80
    assert memory.variance is None


def test_the_update_is_no_larger_than_d_times_the_relative_step() -> None:
    param, memory = torch.ones(40, dtype=torch.float64), AdafactorMoments.zeros(torch.ones(40).double())
    _, memory = adafactor_rule(param, torch.full_like(param, 1e-3), memory)
    new, _ = adafactor_rule(param, torch.full_like(param, 100.0), memory, lr=0.01, d=1.0)
    size = (new - param).square().mean().sqrt().item()
    assert size == pytest.approx(0.01, rel=1e-9), "clipped to lr times the weights' root mean square"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (3, 4)])
def test_it_keeps_the_dtype_and_writes_nothing_in_place(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    param, grad = torch.ones(shape, dtype=dtype), torch.ones(shape, dtype=dtype)
    memory = AdafactorMoments.zeros(param)
    new, after = adafactor_rule(param, grad, memory, weight_decay=0.1, maximize=True)
    assert new.dtype == dtype
    for value in (after.row_var, after.col_var, after.variance):
        assert value is None or value.dtype == dtype
    for tensor in (param, grad):
        assert torch.equal(tensor, torch.ones(shape, dtype=dtype))
    assert not any(value.any() for value in (memory.row_var, memory.variance) if value is not None)


def test_training_a_quadratic_converges() -> None:
    param, memory = torch.full((6, 4), 3.0, dtype=torch.float64), AdafactorMoments.zeros(torch.zeros(6, 4).double())
    for _ in range(300):
        param, memory = adafactor_rule(param, 2 * (param - 1), memory, lr=0.05)
    assert (param - 1).abs().max() < 0.1


def test_empty_tensors_pass() -> None:
    param = torch.zeros(0)
    new, _ = adafactor_rule(param, param, AdafactorMoments.zeros(param))
    assert new.shape == (0,)
