"""1-bit LAMB: its pure rule, its numbers of tensors, and its one scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim
from zoptim import LAMB, OneBitLamb, OneBitLambMoments, OneBitLambPolicy, WholeTensors, onebit_lamb_rule
from zoptim.rules.onebit_lamb import momentum_scales


def signs(tensors: Sequence[Tensor]) -> list[Tensor]:
    scale = torch.cat([tensor.flatten() for tensor in tensors]).square().mean().sqrt()
    return [torch.where(tensor >= 0, scale, -scale) for tensor in tensors]


def signs_(tensors: Sequence[Tensor]) -> None:
    for tensor, sign in zip(tensors, signs(tensors)):
        tensor.copy_(sign)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_optimizer_follows_its_pure_rule(decay: float) -> None:
    generator = torch.Generator().manual_seed(3)
    params = [torch.randn(5, 3, generator=generator) * 3, torch.randn(20, generator=generator)]
    own = [param.clone().requires_grad_() for param in params]
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": decay, "eps": 1e-4, "betas": (0.9, 0.99)}
    optimizer = OneBitLamb(own, **options, freeze_step=6)
    optimizer.connect(WholeTensors(signs_, world_size=2))
    moments = [OneBitLambMoments.zeros(param) for param in params]
    for step in range(16):
        assert optimizer.needs_local_gradients is (step >= 6)
        grads = [torch.randn(param.shape, generator=generator) for param in params]
        for param, grad in zip(own, grads):
            param.grad = grad * 8
        optimizer.grad_scale = torch.tensor(8.0)
        optimizer.step()
        params, moments = onebit_lamb_rule(
            params, grads, moments, OneBitLambPolicy(), mean=signs, freeze_step=6, **options
        )
        for index, (param, expected, each) in enumerate(zip(own, params, moments)):
            torch.testing.assert_close(param.detach(), expected, rtol=1e-4, atol=1e-5, msg=f"step {step}")
            if step > 6:
                numbers = optimizer.param_groups[0]["tensors"][str(index)]
                assert numbers == pytest.approx([each.coefficient, each.factor, each.scale], rel=1e-4)
    assert len({round(each.factor, 5) for each in moments}) == 2, "each tensor has a factor of its own"


def test_the_warm_up_is_lamb() -> None:
    """Of torch's LAMB without bias correction, after the first call, which only counts."""
    params = [torch.linspace(-1, 2, 12).view(3, 4).requires_grad_() for _ in range(2)]
    ours, theirs = (
        OneBitLamb(params[:1], lr=0.1, weight_decay=0.1, freeze_step=9),
        LAMB(params[1:], lr=0.1, weight_decay=0.1, bias_correction=False),
    )
    for step in range(5):
        for param in params:
            param.grad = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        ours.step()
        if step:
            theirs.step()
    torch.testing.assert_close(params[0], params[1])


def test_a_loaded_run_continues() -> None:
    def run(optimizer: OneBitLamb, param: Tensor, calls: range) -> None:
        for call in calls:
            param.grad = torch.randn(64, generator=torch.Generator().manual_seed(call))
            optimizer.step()

    for cut in (1, 3, 5):
        straight, resumed = torch.ones(64, requires_grad=True), torch.ones(64, requires_grad=True)
        run(OneBitLamb([straight], freeze_step=3), straight, range(8))
        first, second = OneBitLamb([resumed], freeze_step=3), OneBitLamb([resumed], freeze_step=3)
        run(first, resumed, range(cut))
        second.load_state_dict(first.state_dict())
        run(second, resumed, range(cut, 8))
        assert torch.equal(straight, resumed)


def test_bounds() -> None:
    policy = OneBitLambPolicy()
    assert policy.ratio(0.0, 1.0) == policy.ratio(1.0, 0.0) == 1.0
    assert policy.ratio(100.0, 1.0) == 10.0
    assert policy.ratio(1e-4, 1.0) == 0.01
    assert policy.mean_coefficient(0.5, 1.0) == 0.5, "a ratio of 1 does not count"
    assert policy.mean_coefficient(0.5, 2.0) == pytest.approx(0.65)
    assert policy.bounded(100.0, 1.0) == pytest.approx(1.1)
    assert policy.bounded(0.0, 1.0) == pytest.approx(0.9)
    assert policy.bounded(100.0, 4.0) == 4.0
    assert momentum_scales([1.0, 3.0, 0.0]) == pytest.approx([4 / 3, 4 / 9, 1.0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"amsgrad": True}, RuntimeError, "1-bit LAMB does not support amsgrad"),
        ({"max_coeff": 0.001}, ValueError, "max_coeff is 0.001"),
        ({"factor_max": 0.1}, ValueError, "factor_max is 0.1"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        OneBitLamb([torch.zeros(1, requires_grad=True)], **options)


def test_configs_build_it() -> None:
    made = zoptim.make_optimizer("OneBitLamb", [torch.zeros(1, requires_grad=True)], {"factor_max": 5.0})
    assert isinstance(made, OneBitLamb)
    assert made.policy.factor_max == 5.0
