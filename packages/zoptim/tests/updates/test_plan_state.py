"""State set by other code: read by value or rejected; never read out of bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoptim

SHAPES = [(4, 4), (3,), (4, 4)]


def as_number(state: dict[str, Any]) -> None:
    state["step"] = 2


def as_integers(state: dict[str, Any]) -> None:
    state["step"] = state["step"].to(torch.int64)


def with_a_dim(state: dict[str, Any]) -> None:
    state["step"] = state["step"].view(1)


def in_float64(state: dict[str, Any]) -> None:
    state["exp_avg"] = state["exp_avg"].double()


def turned(state: dict[str, Any]) -> None:
    state["exp_avg"] = state["exp_avg"].t().contiguous().t()


def with_holes(state: dict[str, Any]) -> None:
    wide = torch.zeros(4, 8)
    wide[:, ::2] = state["exp_avg"]
    state["exp_avg"] = wide[:, ::2]


def with_things_of_his_own(state: dict[str, Any]) -> None:
    state["note"] = "mine"


@pytest.mark.parametrize("tamper", [as_number, as_integers, with_a_dim, in_float64, turned, with_holes,
                                    with_things_of_his_own], ids=lambda tamper: tamper.__name__)  # fmt: skip
def test_state_in_another_layout_keeps_its_values(tamper: Any, lab: Any) -> None:
    params, others = lab.make_params(SHAPES), lab.make_params(SHAPES)
    optimizer, other = zoptim.AdamW(params, lr=0.1), zoptim.AdamW(others, lr=0.1)
    for o, p in ((optimizer, params), (other, others)):
        lab.run(o, p, range(2), SHAPES)
    tamper(optimizer.state[params[0]])
    for o, p in ((optimizer, params), (other, others)):
        lab.run(o, p, range(2, 4), SHAPES)
    lab.assert_bitwise(params, others)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "exp_avg_scale",
            torch.ones(1),
            r"exp_avg_scale of parameter 0 of group 0 has shape \(1,\), it must have \(3,\)",
        ),
        ("exp_avg_scale", None, r"parameter 0 of group 0 lacks exp_avg_scale"),
        ("exp_avg", torch.ones(3), r"exp_avg of parameter 0 of group 0 has shape \(3,\), the parameter has \(700,\)"),
    ],
)
def test_state_of_another_size_never_reaches_a_kernel(key: str, value: Any, message: str, lab: Any) -> None:
    params = lab.make_params([(700,)])
    optimizer = zoptim.AdamW(params, state_dtype="8bit")
    lab.run(optimizer, params, range(2), [(700,)])
    optimizer.state[params[0]][key] = value
    before = params[0].detach().clone()
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(params[0].detach(), before)
