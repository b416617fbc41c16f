"""Lion beyond the contract table in conftest.py."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim

every_path = pytest.mark.parametrize("foreach", [None, True], ids=["kernel", "torch"])


def make(numel: int = 8, grad: float = 1.0, **options: Any) -> tuple[Tensor, zoptim.Lion]:
    param = torch.ones(numel, requires_grad=True)
    param.grad = torch.full((numel,), grad)
    return param, zoptim.Lion([param], **options)


def test_the_first_arguments_have_the_papers_order_and_defaults() -> None:
    parameters = inspect.signature(zoptim.Lion).parameters
    assert list(parameters)[:4] == ["params", "lr", "betas", "weight_decay"]
    assert [parameters[name].default for name in ("lr", "betas", "weight_decay")] == [1e-4, (0.9, 0.99), 0.0]


@every_path
@pytest.mark.parametrize("grad", [1e-20, 1e-3, 7.0, 1e20, -1.0])
def test_every_element_moves_by_lr_for_any_gradient(grad: float, foreach: Any) -> None:
    param, optimizer = make(grad=grad, lr=0.25, foreach=foreach)
    optimizer.step()
    assert torch.equal(param.detach(), torch.full((8,), 1.25 if grad < 0 else 0.75))


@every_path
def test_a_zero_gradient_and_a_zero_mean_move_nothing_but_the_decay(foreach: Any) -> None:
    param, optimizer = make(grad=0.0, lr=0.5, weight_decay=0.5, foreach=foreach)
    optimizer.step()
    assert torch.equal(param.detach(), torch.full((8,), 0.75))


@every_path
def test_the_step_and_the_mean_interpolate_with_betas_of_their_own(foreach: Any) -> None:
    param, optimizer = make(grad=1.0, lr=0.25, betas=(0.9, 0.5), foreach=foreach)
    optimizer.step()
    assert optimizer.state[param]["exp_avg"][0].item() == 0.5
    param.grad = torch.full((8,), -4.0)  # 0.9 * 0.5 - 0.1 * 4 is still positive
    optimizer.step()
    assert param[0].item() == 0.5
    assert optimizer.state[param]["exp_avg"][0].item() == -1.75
    optimizer.step()
    assert param[0].item() == 0.75


@every_path
def test_nan_stays_visible(foreach: Any) -> None:
    param, optimizer = make(lr=0.25, foreach=foreach)
    param.grad[3] = float("nan")  # type: ignore[index]
    optimizer.step()
    assert param.detach().isnan().nonzero().flatten().tolist() == [3]


def test_float32_states_need_no_count_and_rounded_ones_have_it() -> None:
    for state_dtype, keys in (
        (None, {"exp_avg"}), ("bf16", {"exp_avg", "step"}), ("8bit", {"exp_avg", "exp_avg_scale", "step"})
    ):  # fmt: skip
        param, optimizer = make(state_dtype=state_dtype)
        optimizer.step()
        assert set(optimizer.state[param]) == keys


def test_a_state_without_a_count_begins_to_count_where_rounding_needs_it() -> None:
    _, source = make()
    source.step()
    other, target = make(state_dtype="bf16")
    target.load_state_dict(source.state_dict())
    target.step()
    assert target.state[other]["step"].item() == 1.0


def test_betas_may_be_a_list() -> None:
    assert make(betas=[0.5, 0.6])[1].param_groups[0]["betas"] == (0.5, 0.6)
