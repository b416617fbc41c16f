"""muP optimizers: rates by the widths of parameters, as mup's own functions scale them."""

from __future__ import annotations

import copy
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

import zoptim
from zoptim import make_optimizer
from zoptim.errors import BaseShapesMissingError
from zoptim.optimizers.mup import LR_FACTOR


@attrs.frozen
class Dim:
    base: int | None  # None: not wide
    size: int

    @property
    def ratio(self) -> float:
        return 1 if self.base is None else self.size / self.base


@attrs.frozen
class Shape:
    """The part of mup.InfShape that optimizers read; mup's rules, written anew."""

    dims: tuple[Dim, ...]

    def ninf(self) -> int:
        return sum(dim.base is not None for dim in self.dims)

    def width_mult(self) -> float:
        return next((dim.ratio for dim in reversed(self.dims) if dim.base is not None), 1)

    def fanin_fanout_mult_ratio(self) -> float:
        return self.dims[1].ratio / self.dims[0].ratio


def model_of(width: int, base: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2 * width), nn.Linear(2 * width, 2))
    reference = nn.Sequential(nn.Linear(3, base), nn.Tanh(), nn.Linear(base, 2 * base), nn.Linear(2 * base, 2))
    for param, of_base in zip(model.parameters(), reference.parameters()):
        wide = zip(of_base.shape, param.shape)
        param.infshape = Shape(tuple(Dim(None if a == b and a in (2, 3) else a, b) for a, b in wide))
    return model


def by_parameter(optimizer: torch.optim.Optimizer, model: nn.Module, key: str) -> dict[str, float]:
    names = {id(param): name for name, param in model.named_parameters()}
    return {names[id(param)]: group[key] for group in optimizer.param_groups for param in group["params"]}


def test_adams_divide_the_rate_of_matrices_by_their_width() -> None:
    model = model_of(16)
    for name in ("MuAdam", "muadamw"):
        optimizer = make_optimizer(name, model.parameters(), {"lr": 0.1, "weight_decay": 0.2})
        assert type(optimizer) is (zoptim.Adam if name == "MuAdam" else zoptim.AdamW)
        lr, decay = (by_parameter(optimizer, model, key) for key in ("lr", "weight_decay"))
        assert {n for n, value in lr.items() if value == 0.1 / 4} == {"2.weight"}
        assert {n for n, value in lr.items() if value == 0.1} == set(lr) - {"2.weight"}
        assert decay == {n: pytest.approx(0.8 if n == "2.weight" else 0.2) for n in lr}


def test_sgd_scales_vectors_up_and_matrices_by_the_ratio_of_their_widths() -> None:
    model = model_of(16)
    model[2].weight.infshape = Shape((Dim(8, 16), Dim(4, 16)))  # fan-out twice, fan-in four times the base
    optimizer = make_optimizer("MuSGD", list(model.named_parameters()), {"lr": 0.1, "momentum": 0.9})
    assert type(optimizer) is zoptim.SGD
    lr = by_parameter(optimizer, model, "lr")
    assert lr == {
        name: pytest.approx(0.1 * factor)
        for name, factor in {
            "0.weight": 4.0,
            "0.bias": 4.0,
            "2.weight": 0.5,
            "2.bias": 4.0,
            "3.weight": 4.0,
            "3.bias": 1.0,
        }.items()
    }
    assert {group["momentum"] for group in optimizer.param_groups} == {0.9}


def test_groups_keep_their_options_and_defaults_are_those_of_the_optimizer() -> None:
    model = model_of(16)
    groups = [{"params": model[2].parameters(), "lr": 0.5, "eps": 1e-4}, {"params": model[0].parameters()}]
    optimizer = make_optimizer("MuAdamW", groups)
    lr, eps = (by_parameter(optimizer, model, key) for key in ("lr", "eps"))
    assert lr == {"2.weight": 0.125, "2.bias": 0.5, "0.weight": 1e-3, "0.bias": 1e-3}
    assert {eps["2.weight"], eps["2.bias"]} == {1e-4}
    assert set(by_parameter(optimizer, model, "weight_decay").values()) == {0.0}


@pytest.mark.parametrize("name", ["MuAdam", "MuAdamW", "MuSGD"])
def test_a_model_of_the_base_width_trains_as_with_the_plain_optimizer(name: str) -> None:
    model = model_of(4)
    plain = copy.deepcopy(model)
    options = {"lr": 0.05, "weight_decay": 0.1}
    plain_name = {"MuAdam": zoptim.Adam, "MuAdamW": zoptim.AdamW, "MuSGD": zoptim.SGD}[name]
    pairs = [
        (model, make_optimizer(name, model.parameters(), options)),
        (plain, plain_name(plain.parameters(), **options)),
    ]
    for step in range(5):
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(step))
        for each, optimizer in pairs:
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
    for param, other in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(param, other, rtol=1e-6, atol=1e-7)


def test_schedules_keep_the_factors_where_one_rate_is_given_for_all_groups() -> None:
    model = model_of(16)
    optimizer = make_optimizer("MuAdam", model.parameters(), {"lr": 0.1})
    schedule = zoptim.make_schedule(
        "WarmupLR", optimizer, {"warmup_max_lr": 0.2, "warmup_num_steps": 4, "warmup_type": "linear"}
    )
    for _ in range(10):
        schedule.step()
    lr = by_parameter(optimizer, model, "lr")
    assert lr["2.weight"] == pytest.approx(0.2 / 4)
    assert lr["0.weight"] == pytest.approx(0.2)
    assert by_parameter(optimizer, model, LR_FACTOR)["2.weight"] == 0.25
    cycle = zoptim.make_schedule(
        "OneCycle", optimizer, {"cycle_min_lr": 0.1, "cycle_max_lr": 0.4, "cycle_first_step_size": 2}
    )
    assert cycle.get_lr() == pytest.approx([cycle.get_lr()[0] * f for f in (1.0, 0.25)])


def test_missing_base_shapes_say_what_to_install_and_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    param: Any = torch.ones(4, 2, requires_grad=True)
    for spec, told in (
        (None, r"Install the package mup \(pip install mup\), and call"),
        (object(), "base shape.*Call"),
    ):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=spec: found)
        with pytest.raises(BaseShapesMissingError, match=told + ".* mup.set_base_shapes"):
            make_optimizer("MuAdam", [("weight", param)])
    param.infshape = Shape((Dim(1, 2), Dim(1, 2), Dim(1, 2)))
    with pytest.raises(ValueError, match="3 wide dimensions; muP scales at most two"):
        make_optimizer("MuSGD", [param])


def test_options_are_checked_before_shapes() -> None:
    param: Tensor = torch.ones(2, 2, requires_grad=True)
    with pytest.raises(zoptim.UnknownNameError, match="Did you mean 'weight_decay'"):
        make_optimizer("MuAdam", [param], {"weight_decya": 0.1})
    with pytest.raises(ValueError, match="lr"):
        make_optimizer("MuAdam", [param], {"lr": -1.0})


def test_groups_equal_those_of_mup() -> None:
    mup = pytest.importorskip("mup")
    widths = (16, 4, 8)
    model, base, other = (nn.Sequential(nn.Linear(3, w), nn.Linear(w, w), mup.MuReadout(w, 2)) for w in widths)
    mup.set_base_shapes(model, base, delta=other)
    for name, function in (("MuAdam", mup.MuAdam), ("MuAdamW", mup.MuAdamW), ("MuSGD", mup.MuSGD)):
        ours = make_optimizer(name, model.parameters(), {"lr": 0.1, "weight_decay": 0.3})
        theirs = function(model.parameters(), lr=0.1, weight_decay=0.3)
        for key in ("lr", "weight_decay"):
            assert by_parameter(ours, model, key) == pytest.approx(by_parameter(theirs, model, key))
