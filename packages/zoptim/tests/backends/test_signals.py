from __future__ import annotations

from typing import Any

import pytest
import torch

from zoptim.backends.signals import NO_SCALE, Signals, is_skipped, read_signals, signals_on


def test_signals_become_float32_scalars() -> None:
    signals = read_signals(torch.tensor([2.0], dtype=torch.bfloat16), torch.tensor([[3]]))
    assert signals.grad_scale is not None
    assert signals.found_inf is not None
    assert (signals.grad_scale.shape, signals.grad_scale.dtype, signals.grad_scale.item()) == ((), torch.float32, 2.0)
    assert (signals.found_inf.shape, signals.found_inf.dtype, signals.found_inf.item()) == ((), torch.float32, 3.0)


def test_a_divisor_of_float64_gradients_keeps_its_bits() -> None:
    signals = read_signals(torch.tensor([1 / 3], dtype=torch.float64), torch.tensor([3], dtype=torch.float64))
    assert signals.grad_scale is not None
    assert signals.found_inf is not None
    assert (signals.grad_scale.shape, signals.grad_scale.item()) == ((), 1 / 3)
    assert signals.found_inf.dtype == torch.float32


def test_a_float32_scalar_is_not_copied() -> None:
    """The device may write it between steps, and reading costs nothing."""
    scale, found = torch.tensor(2.0), torch.tensor(0.0)
    signals = read_signals(scale, found)
    assert signals.grad_scale is scale
    assert signals.found_inf is found


def test_a_scale_that_requires_grad_is_detached() -> None:
    signals = read_signals(torch.tensor(2.0, requires_grad=True), None)
    assert signals.grad_scale is not None
    assert not signals.grad_scale.requires_grad


def test_no_scale_and_none_divide_nothing() -> None:
    assert read_signals(NO_SCALE, None).grad_scale is None
    assert read_signals(None, None).grad_scale is None
    assert read_signals(None, None).found_inf is None
    assert NO_SCALE.item() == 1.0, "torch.amp.GradScaler multiplies with it"


@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
@pytest.mark.parametrize("bad", [1.0, torch.ones(2), torch.ones(0), "1", True])
def test_anything_else_raises_with_the_name(name: str, bad: Any) -> None:
    given = {"grad_scale": None, "found_inf": None, name: bad}
    with pytest.raises(TypeError, match=rf"{name} is .*; it must be a tensor of one element, or None"):
        read_signals(**given)


@pytest.mark.parametrize(
    ("found", "skipped"), [(None, False), (0.0, False), (-0.0, False), (1.0, True), (0.5, True), (float("nan"), True)]
)
def test_anything_but_zero_skips(found: float | None, skipped: bool) -> None:
    assert is_skipped(Signals(found_inf=None if found is None else torch.tensor(found))) is skipped


def test_signals_are_taken_to_the_device_and_stay_where_they_are() -> None:
    signals = Signals(grad_scale=torch.tensor(2.0), found_inf=None)
    assert signals_on(signals, torch.device("cpu")).grad_scale is signals.grad_scale
    moved = signals_on(signals, torch.device("meta"))
    assert moved.grad_scale is not None
    assert moved.grad_scale.device.type == "meta"
    assert moved.found_inf is None
