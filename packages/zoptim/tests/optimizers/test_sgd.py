"""SGD beyond the contract table in conftest.py."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

import zoptim


def make_param(grad: float | None = 1.0) -> Tensor:
    param = torch.ones(20, requires_grad=True)
    param.grad = None if grad is None else torch.full((20,), grad)
    return param


def test_arguments_have_the_names_order_and_defaults_of_torch() -> None:
    mine, torchs = (inspect.signature(cls).parameters for cls in (zoptim.SGD, torch.optim.SGD))
    for name in set(mine) & set(torchs):
        assert (mine[name].default, mine[name].kind) == (torchs[name].default, torchs[name].kind), name
    assert set(torchs) - set(mine) == {"differentiable"}
    assert set(mine) - set(torchs) == {"state_dtype", "split_master"}


def test_plain_sgd_keeps_no_state() -> None:
    param = make_param()
    optimizer = zoptim.SGD([param], lr=0.5)
    optimizer.step()
    assert torch.equal(param.detach(), torch.full((20,), 0.5))
    assert optimizer.state_dict()["state"] in ({}, {0: {}})


@pytest.mark.parametrize("foreach", [None, True])
def test_a_skipped_first_step_creates_no_buffer(foreach: bool | None) -> None:
    param = make_param(7.0)
    optimizer = zoptim.SGD([param], lr=0.1, momentum=0.9, dampening=0.5, foreach=foreach)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert not optimizer.state[param]
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    assert torch.equal(optimizer.state[param]["momentum_buffer"], torch.full((20,), 7.0)), "undampened"


@pytest.mark.parametrize("foreach", [None, True])
def test_a_late_parameter_starts_undampened_beside_one_that_is_under_way(foreach: bool | None) -> None:
    early, late = make_param(), make_param(None)
    optimizer = zoptim.SGD([early, late], lr=0.1, momentum=0.5, dampening=0.5, foreach=foreach)
    optimizer.step()
    late.grad = torch.full((20,), 3.0)
    optimizer.step()
    buffers = [optimizer.state[param]["momentum_buffer"][0].item() for param in (early, late)]
    assert buffers == [0.5 * 1.0 + 0.5 * 1.0, 3.0]


def test_a_buffer_that_torch_saved_as_none_counts_as_absent() -> None:
    param = make_param()
    optimizer = zoptim.SGD([param], lr=0.1, momentum=0.9)
    state = optimizer.state_dict()
    state["state"] = {0: {"momentum_buffer": None}}
    optimizer.load_state_dict(state)
    optimizer.step()
    assert torch.equal(optimizer.state[param]["momentum_buffer"], torch.ones(20))


def test_momentum_switched_off_and_on_continues_with_its_buffer() -> None:
    param = make_param()
    optimizer = zoptim.SGD([param], lr=0.1, momentum=0.9)
    optimizer.step()
    for momentum in (0.0, 0.9):
        optimizer.param_groups[0]["momentum"] = momentum
        optimizer.step()
    torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], torch.full((20,), 1.9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_are_updated_at_every_length(dtype: torch.dtype) -> None:
    for numel in (7, 32, 33, 100):
        param = torch.ones(numel, dtype=dtype, requires_grad=True)
        param.grad = torch.full((numel,), 4.0, dtype=dtype)
        zoptim.SGD([param], lr=0.125).step()
        assert torch.equal(param.detach(), torch.full((numel,), 0.5, dtype=dtype))
