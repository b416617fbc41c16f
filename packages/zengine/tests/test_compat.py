"""Private torch APIs: these tests fail by name on a torch that has changed them."""

from __future__ import annotations

import pytest
import torch

from zengine import _compat


def test_autograd_calls_back_once_at_the_end_of_a_backward_that_ended_well():
    told: list[str] = []
    weight = torch.ones(2, requires_grad=True)
    loss = weight.sum()

    def begin(_grad: torch.Tensor) -> None:
        assert _compat.at_end_of_backward(lambda: told.append("end"))
        told.append("begin")

    loss.register_hook(begin)
    weight.register_hook(lambda _grad: told.append("weight"))
    loss.backward()
    assert told == ["begin", "weight", "end"]


def test_what_the_callback_raises_comes_out_of_backward():
    loss = torch.ones(2, requires_grad=True).sum()

    def fail() -> None:
        raise ValueError("told at the end")

    loss.register_hook(lambda _grad: _compat.at_end_of_backward(fail) and None)
    with pytest.raises(ValueError, match="told at the end"):
        loss.backward()


def test_no_callback_comes_after_a_backward_that_failed():
    told: list[str] = []
    weight = torch.ones(2, requires_grad=True)
    loss = weight.sum()
    loss.register_hook(lambda _grad: _compat.at_end_of_backward(lambda: told.append("end")) and None)
    weight.register_hook(lambda _grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert told == []


def test_a_backward_has_a_number_of_its_own():
    seen: list[int] = []
    assert _compat.backward_number() == 0
    for _ in range(2):
        loss = torch.ones(2, requires_grad=True).sum()
        loss.register_hook(lambda _grad: seen.append(_compat.backward_number()))
        loss.backward()
    assert 0 not in seen
    assert len(set(seen)) == 2
