"""Training with cheaper formats: a split master changes nothing, rounded moments nothing on average."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim
from zoptim.states import formats

SHAPES = [(300,), (20, 30), (), (0,)]


# A split master is a float32 master -------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", [None, "bf16", "8bit"])
def test_a_split_master_goes_the_way_of_a_float32_master_bit_for_bit(
    row: Any, state_dtype: str | None, lab: Any
) -> None:
    """Both read the same bf16 gradients; the float32 master mirrors a bf16 weight."""
    split = lab.make_params(SHAPES, torch.bfloat16)
    masters = [param.detach().float().requires_grad_() for param in split]
    weights = [param.detach().clone().requires_grad_() for param in split]
    # As torch keeps them, moments of split masters are float32: so are those of float32 masters.
    ours, theirs = (
        row.make(split, split_master=True, state_dtype=state_dtype),
        row.make(masters, state_dtype=state_dtype),
    )
    for master, weight in zip(masters, weights):
        theirs.mirror(master, weight)
    for step in range(20):
        for a, b, grad in zip(split, weights, lab.make_grads(step, SHAPES)):
            a.grad = b.grad = grad.bfloat16()
        ours.step()
        theirs.step()
    for param, master, weight in zip(split, masters, weights):
        joined = formats.join(param.detach(), ours.state[param]["remainder"])
        assert torch.equal(joined, master.detach())
        apart = (param.detach().float() - weight.detach().float()).abs()
        assert (apart <= weight.detach().float().abs() * 2**-7).all(), "half up and half to even differ at ties alone"
        for name in ours._state_spec(ours.param_groups[0]).names:
            assert torch.equal(ours.state[param][name], theirs.state[master][name])


def test_a_split_master_sees_steps_that_bf16_alone_would_lose() -> None:
    param = torch.ones(1000, dtype=torch.bfloat16, requires_grad=True)
    optimizer = zoptim.SGD([param], lr=1.0, split_master=True)
    param.grad = torch.full_like(param, -(2.0**-12))
    for _ in range(2**8):
        optimizer.step()
    assert torch.equal(param.detach().float(), torch.full((1000,), 1 + 2.0**-4))


# Rounded moments are right on average -----------------------------------------------------------------


def second_moment(state_dtype: str, gradient: Tensor, num_steps: int) -> Tensor:
    """exp_avg_sq over its limit, after `num_steps` with one gradient."""
    param = torch.zeros(gradient.shape, requires_grad=True)
    optimizer = zoptim.AdamW([param], lr=0.0, betas=(0.9, 0.999), state_dtype=state_dtype)
    param.grad = gradient
    for _ in range(num_steps):
        optimizer.step()
    return (
        optimizer._state_spec(optimizer.param_groups[0]).read(optimizer.state[param], "exp_avg_sq")
        / gradient.square()
    )


@pytest.mark.parametrize(("state_dtype", "mean", "spread"), [("bf16", 0.01, 0.1), ("8bit", 0.01, 0.5)])
def test_a_rounded_running_mean_arrives_where_the_exact_one_does(
    state_dtype: str, mean: float, spread: float
) -> None:
    gradient = torch.linspace(0.5, 1.5, 4096)
    found, expected = second_moment(state_dtype, gradient, 4000), second_moment("fp32", gradient, 4000)
    assert (found / expected).mean().item() == pytest.approx(1, abs=mean)
    assert (found / expected - 1).abs().max() < spread


def test_rounded_to_nearest_it_would_stop_on_the_way() -> None:
    """A thousandth of the distance is less than half a step of bf16, so rounding to nearest changes nothing."""
    square = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(4000):
        square = (0.999 * square.float() + 0.001).bfloat16()
    assert square.item() < 0.6


@pytest.mark.parametrize("numel", [1, 7, 4096])
def test_rounded_weights_move_on_average_as_far_as_exact_ones(numel: int) -> None:
    """Steps of a hundredth of the distance between adjacent bf16 values."""
    param = torch.ones(numel, dtype=torch.bfloat16, requires_grad=True)
    optimizer = zoptim.SGD([param], lr=1.0)
    generator = torch.Generator().manual_seed(0)
    moved = torch.zeros(())
    for _ in range(4000):
        step = (2.0**-7 / 100 * (0.5 + torch.rand(numel, generator=generator))).bfloat16()
        param.grad = -step
        moved += step.float().mean()
        optimizer.step()
    room = 0.15 if numel < 100 else 0.01
    assert (param.detach().float().mean() - 1).item() == pytest.approx(moved.item(), rel=room)


# Training ---------------------------------------------------------------------------------------------


def regression(make: Any, dtype: torch.dtype = torch.float32, num_steps: int = 400) -> float:
    """The loss of a two-layer network after training on a noisy teacher: about 0.01 is irreducible."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 16, generator=generator)
    targets = torch.tanh(inputs @ torch.randn(16, 4, generator=generator) / 4)
    targets = targets + 0.1 * torch.randn(targets.shape, generator=generator)
    shapes = [(16, 64), (64,), (64, 4)]
    params = [(torch.randn(s, generator=generator) / 4).to(dtype).requires_grad_() for s in shapes]
    optimizer, losses = make(params), []
    for step in range(num_steps):
        batch = slice(64 * (step % 8), 64 * (step % 8) + 64)
        first, bias, second = (param.float() for param in params)
        loss = ((torch.tanh(inputs[batch] @ first + bias) @ second - targets[batch]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-32:]) / 32


MAKERS: dict[str, Any] = {
    "AdamW": lambda params, **more: zoptim.AdamW(params, lr=3e-3, **more),
    "amsgrad": lambda params, **more: zoptim.AdamW(params, lr=3e-3, amsgrad=True, **more),
    "SGD": lambda params, **more: zoptim.SGD(params, lr=0.1, momentum=0.9, **more),
    "Adagrad": lambda params, **more: zoptim.Adagrad(params, lr=0.05, **more),
    "Lion": lambda params, **more: zoptim.Lion(params, lr=1e-3, **more),
    "LAMB": lambda params, **more: zoptim.LAMB(params, lr=1e-2, **more),
}


@pytest.fixture(scope="module")
def exact() -> dict[str, float]:
    """The losses of float32."""
    return {}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("dtype", "more", "room"),
    [
        (torch.float32, {"state_dtype": "bf16"}, 0.03),
        (torch.float32, {"state_dtype": "8bit"}, 0.08),
        (torch.bfloat16, {"split_master": True}, 0.03),
        (torch.bfloat16, {"split_master": True, "state_dtype": "8bit"}, 0.08),
        (torch.bfloat16, {}, 0.05),
    ],
    ids=["bf16 states", "8bit", "split", "split 8bit", "all bf16"],
)
def test_training_reaches_the_loss_of_float32(
    name: str, dtype: torch.dtype, more: dict[str, Any], room: float, exact: dict[str, float]
) -> None:
    make = MAKERS[name]
    if name not in exact:
        exact[name] = regression(make)
    found = regression(lambda params: make(params, **more), dtype)
    assert exact[name] < 0.03
    assert found == pytest.approx(exact[name], rel=room)
