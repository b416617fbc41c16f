"""Adagrad beyond the contract table in conftest.py."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim

every_path = pytest.mark.parametrize("foreach", [None, True], ids=["kernel", "torch"])


def make(cls: Any = zoptim.Adagrad, numel: int = 20, **options: Any) -> tuple[Tensor, Any]:
    param = torch.linspace(-1, 1, numel).requires_grad_()
    return param, cls([param], **options)


def step(param: Tensor, optimizer: Any, times: int = 1) -> None:
    for _ in range(times):
        param.grad = torch.cos(param.detach() * 7)
        optimizer.step()


def test_arguments_have_the_names_order_and_defaults_of_torch() -> None:
    mine, torchs = (inspect.signature(cls).parameters for cls in (zoptim.Adagrad, torch.optim.Adagrad))
    positional = [name for name in torchs if name != "foreach"][:6]
    assert list(mine)[:6] == positional
    for name in positional[1:]:
        assert mine[name].default == torchs[name].default, name
    assert set(mine) - set(torchs) == {"state_dtype", "split_master"}
    assert set(torchs) - set(mine) == {"differentiable"}


@every_path
def test_defaults_train_as_torchs_do(foreach: Any, lab: Any) -> None:
    ours, theirs = make(foreach=foreach), make(torch.optim.Adagrad)
    step(*ours, times=10)
    step(*theirs, times=10)
    lab.assert_near([ours[0]], [theirs[0]], rtol=1e-6, atol=1e-7)


@every_path
@pytest.mark.parametrize("state_dtype", [None, "bf16", "8bit"])
def test_sums_begin_at_the_initial_value(state_dtype: str | None, foreach: Any) -> None:
    param, optimizer = make(initial_accumulator_value=0.25, lr=0.5, eps=0.0, state_dtype=state_dtype, foreach=foreach)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    memory = optimizer._state_spec(optimizer.param_groups[0])
    assert torch.equal(memory.read(optimizer.state[param], "sum"), torch.full((20,), 0.25))
    param.grad = torch.full_like(param, 0.5)
    before = param.detach().clone()
    optimizer.step()
    torch.testing.assert_close(before - param.detach(), torch.full((20,), 0.5 * 0.5 / 0.5**0.5), rtol=1e-6, atol=1e-7)


@every_path
def test_the_rate_decays_with_the_updates_that_were_applied(foreach: Any) -> None:
    param, optimizer = make(lr=1.0, lr_decay=1.0, eps=0.0, initial_accumulator_value=0.0, foreach=foreach)
    for count in range(4):
        before = param.detach().clone()
        param.grad = torch.ones_like(param)
        optimizer.step()
        expected = 1 / (1 + count) / (count + 1) ** 0.5
        torch.testing.assert_close(before - param.detach(), torch.full((20,), expected), rtol=1e-5, atol=1e-6)


def test_torchs_state_with_its_initial_value_continues(lab: Any) -> None:
    theirs, ours = make(torch.optim.Adagrad, initial_accumulator_value=0.5), make()
    ours[1].load_state_dict(copy.deepcopy(theirs[1].state_dict()))
    assert ours[1].param_groups[0]["initial_accumulator_value"] == 0.5
    assert torch.equal(ours[1].state[ours[0]]["sum"], torch.full((20,), 0.5))
    step(*ours, times=3)
    step(*theirs, times=3)
    lab.assert_near([ours[0]], [theirs[0]], rtol=1e-6, atol=1e-7)


def test_state_is_made_by_the_first_update_and_not_before() -> None:
    param, optimizer = make(initial_accumulator_value=0.5)
    assert not optimizer.state
    step(param, optimizer)
    assert list(optimizer.state[param]) == ["step", "sum"]


@every_path
def test_a_zero_gradient_on_a_zero_sum_divides_by_eps_alone(foreach: Any) -> None:
    param, optimizer = make(foreach=foreach)
    before = param.detach().clone()
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(param.detach(), before)
