"""Portable state: decoded as by the kernels, part by part, and encoded to the same codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim
from zoptim.backends import native
from zoptim.states.portable import Coded

MOMENTS = ("exp_avg", "exp_avg_sq")


def trained(shape: tuple[int, ...], state_dtype: str | None = "8bit") -> tuple[Tensor, zoptim.AdamW]:
    """A parameter after three updates by gradients of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    param = torch.zeros(shape, requires_grad=True)
    optimizer = zoptim.AdamW([param], lr=0.1, state_dtype=state_dtype)
    for _ in range(3):
        exponent = torch.empty(shape).uniform_(-6, 1, generator=generator)
        param.grad = torch.randn(shape, generator=generator) * 10**exponent
        optimizer.step()
    return param, optimizer


def read(state: dict[str, Any]) -> dict[str, Tensor]:
    """The state, decoded as in a checkpoint."""
    whole = {key: v.read(0, v.shape.numel()).view(v.shape) for key, v in state.items() if isinstance(v, Coded)}
    return {**state, **whole}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]) for key in a)


@pytest.fixture(params=["kernels", "torch"])
def decoder(request: pytest.FixtureRequest) -> Any:
    """With the kernels that run here, and without kernels."""
    if request.param == "kernels":
        yield
    else:
        with native.use_level("none"), pytest.warns(UserWarning, match="plain torch"):
            yield


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("shape", [(1,), (255,), (256,), (3, 257), (70, 61)], ids=str)
def test_codes_come_back_as_they_were_through_float32(shape: tuple[int, ...]) -> None:
    param, optimizer = trained(shape)
    before = {key: value.clone() for key, value in optimizer.state[param].items()}
    export_state = read(optimizer.portable_state(param))
    assert {key: export_state[key].dtype for key in MOMENTS} == dict.fromkeys(MOMENTS, torch.float32)
    optimizer.load_portable_state(param, export_state)
    assert same(optimizer.state[param], before)


def test_exported_values_equal_torchs_decoding() -> None:
    param, optimizer = trained((70, 61))
    memory = optimizer._state_spec(optimizer.param_groups[0])
    export_state = read(optimizer.portable_state(param))
    assert all(torch.equal(export_state[name], memory.read(optimizer.state[param], name)) for name in MOMENTS)


@pytest.mark.parametrize("span", [(0, 1), (255, 257), (300, 300), (511, 1000), (0, 1000)], ids=str)
def test_a_part_is_the_part_of_the_whole(span: tuple[int, int]) -> None:
    param, optimizer = trained((1000,))
    for name in MOMENTS:
        coded = optimizer.portable_state(param)[name]
        assert torch.equal(coded.read(*span), coded.read(0, 1000)[slice(*span)])


def test_parts_are_counted_in_the_order_of_the_elements_whatever_the_memory_layout() -> None:
    param, optimizer = trained((8, 6, 5, 5))
    plain = read(optimizer.portable_state(param))
    other = param.detach().to(memory_format=torch.channels_last).requires_grad_()
    twin = zoptim.AdamW([other], lr=0.1, state_dtype="8bit")
    twin.load_portable_state(other, plain)
    again = read(twin.portable_state(other))
    for name in MOMENTS:
        floor = float(plain[name].abs().max()) * 2**-15
        torch.testing.assert_close(again[name], plain[name], rtol=2**-4, atol=floor)  # blocks of other elements


@pytest.mark.parametrize("source", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("target", ["fp32", "bf16", "8bit"])
def test_every_format_loads_every_other_format(source: str, target: str) -> None:
    param, optimizer = trained((700,), source)
    given = read(optimizer.portable_state(param))
    other = param.detach().clone().requires_grad_()
    twin = zoptim.AdamW([other], lr=0.1, state_dtype=target)
    twin.load_portable_state(other, given)
    state = twin.state[other]
    assert state["exp_avg"].dtype is zoptim.StateFormat(target).dtype
    assert state["step"] == 3
    taken = read(twin.portable_state(other))
    for name in MOMENTS:
        rtol = {"fp32": 0.0, "bf16": 2**-8, "8bit": 2**-4}[target]
        floor = 0.0 if target == "fp32" else float(given[name].abs().max()) * 2**-15
        torch.testing.assert_close(taken[name].float(), given[name].float(), rtol=rtol, atol=floor)
    assert set(map(id, state.values())).isdisjoint(map(id, given.values()))


def test_the_next_step_updates_the_loaded_state() -> None:
    param, optimizer = trained((64,), "fp32")
    export_state = read(optimizer.portable_state(param))
    optimizer.load_portable_state(param, {**export_state, "step": torch.tensor(10.0)})
    optimizer.step()
    assert optimizer.state[param]["step"] == 11


def test_before_the_first_update_there_is_nothing_to_export() -> None:
    param = torch.zeros(3, requires_grad=True)
    assert zoptim.AdamW([param]).portable_state(param) == {}


def test_state_that_does_not_fit_raises_and_changes_nothing() -> None:
    param, optimizer = trained((64,), "fp32")
    before = optimizer.state[param]
    with pytest.raises(ValueError, match=r"AdamW cannot load this state: .* lacks exp_avg_sq"):
        optimizer.load_portable_state(param, {"step": torch.ones(()), "exp_avg": torch.ones(64)})
    assert optimizer.state[param] is before
    with pytest.raises(ValueError, match=r"shape \(3,\) is not a parameter of this AdamW"):
        optimizer.portable_state(torch.zeros(3))
