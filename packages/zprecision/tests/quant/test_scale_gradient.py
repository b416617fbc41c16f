"""Gradient of fake quantization to a format: autograd through the law, with the codes' rounding as the identity."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zprecision.quant import simulate_format
from zprecision.quant.formats import format_named

Normal = Callable[..., Tensor]


class Identity(torch.autograd.Function):
    """`to`, with the gradient handed to `x`."""

    @staticmethod
    def forward(ctx: object, x: Tensor, to: Tensor) -> Tensor:
        return to.view_as(to)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def by_autograd(x: Tensor, slope: Tensor, name: str) -> Tensor:
    """Return the gradient of s * codes(x / s), where autograd sees how the scale s is computed."""
    group = getattr(format_named(name), "group", 32) or x.shape[-1]
    x = x.detach().double().requires_grad_()
    runs = x.reshape(-1, group)
    stored = simulate_format(x.detach().float(), name).double().reshape(-1, group)
    if "minmax" in name:
        low = runs.amin(-1, keepdim=True)
        scale = (runs.amax(-1, keepdim=True) - low) / 15
        shifted, codes = (runs - low) / scale, (stored - low.detach()) / scale.detach()
        values = low + scale * Identity.apply(shifted, codes)
    elif name == "int4-row":  # the scale that fits the codes best
        whole = _whole_codes(stored)
        scale = (whole * runs).sum(-1, keepdim=True) / whole.square().sum(-1, keepdim=True)
        values = scale * Identity.apply(runs / scale, whole)
    else:
        scale = runs.abs().amax(-1, keepdim=True) / 7
        values = scale * Identity.apply(runs / scale, stored / scale.detach())
    (found,) = torch.autograd.grad(values, x, slope.double().reshape(-1, group))
    return found


def _whole_codes(stored: Tensor) -> Tensor:
    """Return integers of which each row is a multiple."""
    found = []
    for row in stored:
        tries = [row / row.abs().max() * top for top in (7, 8)]
        found.append(min(tries, key=lambda each: float((each - each.round()).abs().max())).round())
    return torch.stack(found)


@pytest.mark.parametrize("name", ["int4-row-amax", "int4-amax", "int4-row", "int4-row-minmax", "nf4", "fp8"])
def test_the_gradient_is_that_of_the_law(name: str, normal: Normal) -> None:
    x, slope = normal(5, 128), normal(5, 128)
    x[0, 3] = -9.0  # an outlier
    x.requires_grad_()
    (found,) = torch.autograd.grad(simulate_format(x, name), x, slope)
    torch.testing.assert_close(found.double(), by_autograd(x, slope, name), rtol=2e-3, atol=2e-3)
    assert not torch.allclose(found, slope, atol=1e-2)  # it is more than the straight-through one


@pytest.mark.parametrize("name", ["q4_k", "q6_k"])
def test_two_levels_of_scales_pass_straight_through(name: str, normal: Normal) -> None:
    x, slope = normal(2, 256).requires_grad_(), normal(2, 256)
    (found,) = torch.autograd.grad(simulate_format(x, name), x, slope)
    assert torch.equal(found, slope)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["int4", "int4-row-amax", "int4-g64-minmax", "q8_0", "nf4"])
def test_rows_that_are_padded_zero_or_tiny_have_gradients(name: str, dtype: torch.dtype, normal: Normal) -> None:
    x, slope = normal(3, 80).to(dtype), normal(3, 80).to(dtype)
    x[1] = 0
    x[2] *= 1e-39  # subnormal numbers, whose inverse overflows
    x.requires_grad_()
    (found,) = torch.autograd.grad(simulate_format(x, name), x, slope)
    assert found.dtype == dtype
    assert bool(found.isfinite().all())
    assert torch.equal(found[1:], slope[1:])
    untouched = (found == slope).float().mean()
    assert untouched > 0.8 or name == "int4"  # only what sets a scale has more


def test_an_outlier_that_the_loss_does_not_read_shrinks() -> None:
    wanted = torch.linspace(-1.0, 1.0, 31).roll(7)
    x = torch.cat([wanted, torch.tensor([4.0])]).reshape(1, -1).requires_grad_()
    optimizer = torch.optim.SGD([x], lr=0.02)
    for _ in range(200):
        optimizer.zero_grad()
        (simulate_format(x, "int4-row-amax")[0, :31] - wanted).square().sum().backward()
        optimizer.step()
    assert x.detach()[0, 31].item() < 3.0  # straight through it would stay
