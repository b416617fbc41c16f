"""deepspeed.runtime.fp16.loss_scaler in a loop of one's own; scales are DeepSpeed 0.19.8's."""

from __future__ import annotations

import pytest
import torch

from zengine.deepspeed.runtime.fp16.loss_scaler import (
    CreateLossScaler,
    DynamicLossScaler,
    LossScaleConfig,
    LossScaleProfile,
    LossScaler,
    to_python_float,
)

ARGS = {
    "init_scale": 16,
    "scale_window": 2,
    "min_scale": 4,
    "delayed_shift": 2,
    "consecutive_hysteresis": False,
}


def test_a_dynamic_scale_moves_as_deepspeeds():
    scaler = DynamicLossScaler(**ARGS)
    found = []
    for overflow in (0, 0, 0, 1, 1, 0, 0, 0, 1, 1):
        scaler.update_scale(bool(overflow))
        found.append((scaler.cur_scale, scaler.cur_hysteresis, scaler.last_overflow_iter))
    assert found == [
        *[(16, 2, -1), (16, 2, -1), (32, 2, -1), (32, 1, 3), (16, 1, 4)],
        *[(16, 1, 4), (16, 1, 4), (32, 2, 4), (32, 1, 8), (16, 1, 9)],
    ]
    assert (scaler.cur_iter, scaler.dynamic) == (10, True)


def test_gradients_that_are_not_finite_are_found_in_sparse_ones_too():
    weight = torch.nn.Parameter(torch.zeros(3))
    scaler = DynamicLossScaler(**ARGS)
    assert not scaler.has_overflow_serial([weight])
    for value in (1.0, float("inf")):
        weight.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([value]), (3,))
        assert scaler.has_overflow_serial([weight]) == (value != 1)


def test_at_the_minimum_an_overflow_raises_unless_told_otherwise():
    for raises in (True, False):
        args = {**ARGS, "init_scale": 4, "delayed_shift": 1, "raise_error_at_min_scale": raises}
        scaler = DynamicLossScaler(**args)
        if raises:
            with pytest.raises(OverflowError, match="the loss scale is at its minimum, 4"):
                scaler.update_scale(True)
        else:
            scaler.update_scale(True)
        assert scaler.cur_scale == 4


def test_losses_and_gradients_are_scaled_and_overflows_found():
    scaler = CreateLossScaler(torch.half, 0, True, ARGS)
    assert isinstance(scaler, DynamicLossScaler)
    weight = torch.ones(2, requires_grad=True)
    scaler.backward(weight.sum())
    assert weight.grad is not None
    assert weight.grad.tolist() == [16.0, 16.0]
    assert scaler.scale_gradient(torch.nn.Identity(), (torch.ones(1),), None)[0].item() == 16.0
    assert not scaler.has_overflow_serial([weight])
    weight.grad[0] = float("inf")
    assert scaler.has_overflow_serial([weight])


def test_other_dtypes_are_not_scaled_and_a_constant_scale_stays():
    assert CreateLossScaler(torch.bfloat16, 8, True, ARGS).loss_scale == 1.0
    constant = CreateLossScaler(torch.half, 8, False, None)
    constant.update_scale(True)
    assert isinstance(constant, LossScaler)
    assert (constant.cur_scale, constant.dynamic) == (8.0, False)
    assert to_python_float(torch.tensor(2.0)) == to_python_float([2.0]) == 2.0


def test_the_config_of_a_scale_has_the_profiles_defaults():
    fused = LossScaleConfig(torch.half, True, 0, None)
    unfused = LossScaleConfig(torch.half, True, 0, None, profile=LossScaleProfile.UNFUSED)
    assert (fused.cur_scale, fused.min_loss_scale, fused.scale_window) == (2.0**32, 1.0, 1000)
    assert (unfused.cur_scale, unfused.min_loss_scale) == (2.0**16, 0.25)
    plain = LossScaleConfig(torch.bfloat16, True, 128, None)
    assert (plain.cur_scale, plain.dynamic_loss_scale, plain.scale_window) == (1.0, False, None)
