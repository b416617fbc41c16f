"""grad_scale and found_inf, for every optimizer of the contract table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


def run_scaled(lab: Any, optimizer: Any, params: list[Tensor], steps: range, scale: float) -> None:
    for step in steps:
        for param, grad in zip(params, lab.make_grads(step)):
            param.grad = (grad * scale).to(param.dtype)
        optimizer.grad_scale = torch.tensor(scale)
        optimizer.step()
        optimizer.grad_scale = None


@pytest.mark.filterwarnings("ignore:.* with plain torch operations, which are slower")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_power_of_two_scale_changes_no_bit(row: Any, path: Any, dtype: torch.dtype, lab: Any) -> None:
    plain, scaled = lab.make_params(dtype=dtype), lab.make_params(dtype=dtype)
    lab.run(row.make(plain, **path), plain, range(5))
    run_scaled(lab, row.make(scaled, **path), scaled, range(5), 1024.0)
    lab.assert_bitwise(scaled, plain)


def test_any_scale_divides_to_rounding(row: Any, path: Any, lab: Any) -> None:
    plain, scaled = lab.make_params(), lab.make_params()
    lab.run(row.make(plain, **path), plain, range(5))
    run_scaled(lab, row.make(scaled, **path), scaled, range(5), 3.7)
    lab.assert_near(scaled, plain, rtol=1e-5, atol=1e-6)


def test_gradients_are_never_written(row: Any, path: Any, lab: Any) -> None:
    params = lab.make_params()
    optimizer = row.make(params, **path)
    optimizer.grad_scale = torch.tensor(3.7)
    lab.run(optimizer, params, range(1))
    lab.assert_bitwise([p.grad for p in params if p.grad is not None], lab.make_grads(0))


@pytest.mark.parametrize("found", [1.0, 2.0, float("nan")])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_found_inf_leaves_weights_state_and_gradients_untouched(
    row: Any, path: Any, found: float, steps_before: int, lab: Any
) -> None:
    params, undisturbed = lab.make_params(), lab.make_params()
    optimizer, other = row.make(params, **path), row.make(undisturbed, **path)
    lab.run(optimizer, params, range(steps_before))
    before = lab.snapshot(optimizer, params) if steps_before else [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.full_like(param, float("inf"))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor([found])
    optimizer.step()
    after = lab.snapshot(optimizer, params)
    lab.assert_bitwise(after[: len(before)], before)
    first = row.options.get("initial_accumulator_value", 0.0)
    for tensor in after[len(before) :]:
        assert bool(torch.isin(tensor, torch.tensor([0.0, first])).all()), "a skipped first step left state"
    assert all(bool(param.grad.isinf().all()) for param in params if param.grad is not None)

    optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(0.0)
    lab.run(optimizer, params, range(steps_before, 6))
    lab.run(other, undisturbed, range(6))
    lab.assert_bitwise(lab.snapshot(optimizer, params), lab.snapshot(other, undisturbed))


def test_torch_grad_scaler_drives_it_as_it_drives_torch(row: Any, lab: Any) -> None:
    ours, theirs = lab.make_params(), lab.make_params()
    for params, optimizer in ((ours, row.make(ours)), (theirs, row.make_torch(theirs))):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(6):
            scaler.scale(torch.ones(()))
            for param, grad in zip(params, lab.make_grads(step)):
                param.grad = grad * (float("inf") if step == 3 else scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**11
    lab.assert_near(ours, theirs, rtol=1e-5, atol=1e-6)


def test_signals_that_are_no_one_element_tensors_raise_with_their_names(row: Any, lab: Any) -> None:
    params = lab.make_params()
    optimizer = row.make(params)
    optimizer.grad_scale = 2.0  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"grad_scale is 2\.0; it must be a tensor of one element"):
        optimizer.step()
    optimizer.grad_scale, optimizer.found_inf = None, torch.zeros(2)
    with pytest.raises(TypeError, match="found_inf is"):
        optimizer.step()
