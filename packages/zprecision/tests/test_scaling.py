"""Scalers: state, order of a step, state dicts; and two defects of other systems that must stay out."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import nn

from zprecision import (
    FP16,
    DynamicScaler,
    DynamicScaling,
    NoScaling,
    Scaler,
    StaticScaler,
    StaticScaling,
    Unscaled,
    clip_divisor,
    inspect,
    make_scaler,
)

CLEAN, OVERFLOW = torch.tensor(0.0), torch.tensor(1.0)


# --- Two defects, in a plain fp16 loop -------------------------------------------------------------------


class Fp16Sgd:
    """The smallest honest fp16 training: fp16 weights in the model, a float32 master, SGD with lr 0.1.

    The loss is 2 * w on inputs of one, so every gradient is 2 and every update must be -0.2.
    """

    def __init__(self, scaler: Scaler) -> None:
        self.model = FP16.cast_module(nn.Linear(1, 1, bias=False))
        nn.init.constant_(self.model.weight, 3.0)
        self.master = nn.Parameter(self.model.weight.detach().float())
        self.optimizer = torch.optim.SGD([self.master], lr=0.1)
        self.scaler = scaler

    def backward(self) -> torch.Tensor:
        loss = (2 * self.model(torch.ones(1, 1, dtype=torch.float16))).float().sum()
        self.scaler.scale(loss).backward()
        return self.model.weight.grad.float()

    def update(self, gradient: torch.Tensor, divisor: torch.Tensor) -> float:
        """Applies the update; returns the change of the weight, and puts it back for the next step."""
        start = self.master.detach().clone()
        self.master.grad = gradient / divisor
        self.optimizer.step()
        change = (self.master.detach() - start).item()
        self.master.data.copy_(start)
        self.model.zero_grad()
        return change


def right_step(loop: Fp16Sgd) -> float:
    gradient = loop.backward()
    stats = inspect([gradient])
    change = loop.update(gradient, clip_divisor(stats.norm, loop.scaler.factor, 0))
    loop.scaler.update(stats.found_inf)
    return change


def step_that_updates_the_scale_first(loop: Fp16Sgd) -> float:
    gradient = loop.backward()
    stats = inspect([gradient])
    loop.scaler.update(stats.found_inf)
    return loop.update(gradient, clip_divisor(stats.norm, loop.scaler.factor, 0))


def test_a_scaled_step_moves_the_weight_as_far_as_an_unscaled_one() -> None:
    # The defect: the loss is not multiplied, the gradient is divided all the same: -0.2 / 1024.
    assert right_step(Fp16Sgd(StaticScaler(StaticScaling(2.0**10)))) == pytest.approx(-0.2, rel=1e-6)
    assert right_step(Fp16Sgd(DynamicScaler(DynamicScaling(initial=2.0**10)))) == pytest.approx(-0.2, rel=1e-6)
    assert right_step(Fp16Sgd(NoScaling())) == pytest.approx(-0.2, rel=1e-6)


def test_the_loss_really_carries_the_scale_into_the_gradient() -> None:
    assert Fp16Sgd(StaticScaler(StaticScaling(2.0**10))).backward().item() == 2 * 2.0**10


def changes_and_factors(step: Callable[[Fp16Sgd], float]) -> tuple[list[float], list[float]]:
    loop = Fp16Sgd(DynamicScaler(DynamicScaling(initial=16, window=3)))
    changes, factors = [], []
    for _ in range(12):
        changes.append(step(loop))
        factors.append(loop.scaler.factor.item())
    return changes, factors


def test_the_update_on_a_growth_step_is_as_large_as_on_any_other() -> None:
    changes, factors = changes_and_factors(right_step)
    assert factors == [16] * 3 + [32] * 3 + [64] * 3 + [128] * 3
    assert changes == pytest.approx([-0.2] * 12, rel=1e-6)


def test_the_growth_test_would_see_the_defect() -> None:
    changes, _ = changes_and_factors(step_that_updates_the_scale_first)
    halved = [step for step, change in enumerate(changes) if change == pytest.approx(-0.1, rel=1e-6)]
    assert halved == [3, 6, 9]


def test_a_factor_handed_out_before_update_keeps_the_value_that_backward_used() -> None:
    scaler = DynamicScaler(DynamicScaling(initial=16, window=1, hysteresis=1))
    held = scaler.factor
    for found_inf in (CLEAN, CLEAN, OVERFLOW, OVERFLOW):
        scaler.update(found_inf)
    assert held.item() == 16
    assert scaler.factor.item() == 8


# --- State on the device ---------------------------------------------------------------------------------


def test_scale_and_update_never_wait_for_the_host() -> None:
    # A meta tensor has no value: any .item(), bool() or branch on one raises.
    scaler = DynamicScaler(DynamicScaling(), device="meta")
    scaled = scaler.scale(torch.empty((), device="meta", requires_grad=True))
    scaler.update(torch.empty((), device="meta"))
    assert {scaled.device.type, scaler.factor.device.type, scaler.clean_steps.device.type} == {"meta"}
    with pytest.raises(RuntimeError):
        scaler.state_dict()


@pytest.mark.parametrize("scaler", [StaticScaler(StaticScaling(2.0**16)), DynamicScaler()])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_narrow_loss_is_scaled_in_float32_so_that_the_product_does_not_overflow(scaler, dtype) -> None:
    scaled = scaler.scale(torch.full((1,), 4.0, dtype=dtype))
    assert scaled.dtype == torch.float32
    assert scaled.item() == 4 * 2.0**16


def test_a_float64_loss_stays_float64() -> None:
    assert DynamicScaler().scale(torch.ones((), dtype=torch.float64)).dtype == torch.float64


def test_no_scaling_is_the_identity() -> None:
    scaler = NoScaling()
    loss = torch.tensor(3.0)
    assert scaler.scale(loss) is loss
    scaler.update(OVERFLOW)
    assert scaler.factor.item() == 1.0
    assert scaler.state_dict() == {}
    assert not scaler.at_floor


def test_a_static_scale_never_moves_and_never_counts_as_exhausted() -> None:
    scaler = StaticScaler(StaticScaling(128.0))
    for _ in range(5):
        scaler.update(OVERFLOW)
        scaler.update(CLEAN)
    assert scaler.factor.item() == 128.0
    assert not scaler.at_floor


@pytest.mark.parametrize("floor", [1.0, 0.1])
def test_at_floor_needs_both_the_floor_and_a_used_up_counter(floor: float) -> None:
    scaler = DynamicScaler(DynamicScaling(initial=2 * floor, hysteresis=2, floor=floor))
    seen = []
    for _ in range(3):
        seen.append(scaler.at_floor)
        scaler.update(OVERFLOW)
    assert seen == [False, False, True]  # 2/2 -> 2/1 -> 1/1
    assert scaler.at_floor
    refilled = DynamicScaler(DynamicScaling(initial=floor, hysteresis=2, floor=floor))
    assert not refilled.at_floor


@pytest.mark.parametrize(
    ("found_inf", "moves"),
    [
        (torch.tensor(True), True),
        (torch.tensor([1.0]), True),
        (torch.tensor([[7]]), True),
        (torch.tensor(float("nan")), True),
        (torch.tensor(float("inf"), dtype=torch.float64), True),
        (torch.tensor(False), False),
        (torch.tensor([0.0]), False),
    ],
)
def test_any_one_element_that_is_not_zero_counts_as_overflow(found_inf: torch.Tensor, moves: bool) -> None:
    scaler = DynamicScaler(DynamicScaling(initial=4, hysteresis=1))
    scaler.update(found_inf)
    assert scaler.factor.shape == ()
    assert scaler.factor.item() == (2 if moves else 4)


SCALERS = [NoScaling(), StaticScaler(StaticScaling(2)), DynamicScaler()]


@pytest.mark.parametrize("scaler", SCALERS, ids=lambda scaler: type(scaler).__name__)
def test_what_is_not_one_element_is_rejected(scaler: Scaler) -> None:
    with pytest.raises(ValueError, match=r"shape \(2,\); it must have one element"):
        scaler.update(torch.zeros(2))
    with pytest.raises(TypeError, match=r"got a bool; pass inspect"):
        scaler.update(True)


def test_an_integer_loss_is_rejected() -> None:
    with pytest.raises(TypeError, match=r"torch.int64; it must be a floating"):
        DynamicScaler().scale(torch.tensor(3))


def test_each_rule_makes_its_scaler_on_the_device() -> None:
    rules = [Unscaled(), StaticScaling(4.0), DynamicScaling()]
    made = [make_scaler(rule, "meta") for rule in rules]
    assert [type(scaler) for scaler in made] == [NoScaling, StaticScaler, DynamicScaler]
    assert {scaler.factor.device.type for scaler in made} == {"meta"}
    with pytest.raises(TypeError, match=r"make_scaler got 'dynamic'; pass Unscaled"):
        make_scaler("dynamic", "cpu")


# --- State dicts -----------------------------------------------------------------------------------------

TRACE = [step == "o" for step in "gggogggggoogggggggogggog"]


@pytest.mark.parametrize("cut", range(len(TRACE)))
def test_a_scaler_restored_at_any_step_through_json_goes_on_exactly(cut: int) -> None:
    rule = DynamicScaling(initial=1000.3, growth=1.7, window=3, hysteresis=3, floor=0.3)
    whole = DynamicScaler(rule)
    for overflow in TRACE[:cut]:
        whole.update(torch.tensor(overflow))
    resumed = DynamicScaler(rule)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert resumed.state_dict() == whole.state_dict()
    for overflow in TRACE[cut:]:
        whole.update(torch.tensor(overflow))
        resumed.update(torch.tensor(overflow))
        assert resumed.state_dict() == whole.state_dict()


@pytest.mark.parametrize("scaler", SCALERS, ids=lambda scaler: type(scaler).__name__)
def test_every_state_dict_is_plain_numbers_and_loads_again(scaler: Scaler) -> None:
    state = scaler.state_dict()
    assert all(type(value) in (int, float) for value in state.values())
    scaler.load_state_dict(json.loads(json.dumps(state)))
    assert scaler.state_dict() == state


@pytest.mark.parametrize("scaler", SCALERS, ids=lambda scaler: type(scaler).__name__)
def test_the_state_of_another_kind_of_scaler_is_rejected(scaler: Scaler) -> None:
    for other in SCALERS:
        if type(other) is not type(scaler):
            message = rf"{type(scaler).__name__} cannot load this state: missing .*, unknown "
            with pytest.raises(ValueError, match=message):
                scaler.load_state_dict(other.state_dict())


def test_a_static_scaler_rejects_the_state_of_another_factor() -> None:
    with pytest.raises(ValueError, match=r"StaticScaler: state static_factor=64.0 is outside 128.0..128.0"):
        StaticScaler(StaticScaling(128.0)).load_state_dict(StaticScaler(StaticScaling(64.0)).state_dict())


@pytest.mark.parametrize(
    ("error", "changed", "message"),
    [
        (ValueError, {"factor": 0.5}, r"DynamicScaler: state factor=0.5 is outside 1.0\.\."),
        (ValueError, {"factor": float("inf")}, "factor=inf"),
        (ValueError, {"factor": float("nan")}, "factor=nan"),
        (TypeError, {"factor": "65536"}, "factor='65536' must be a number"),
        (ValueError, {"clean_steps": 8}, r"clean_steps=8 is outside 0\.\.7.*rule it was saved with"),
        (ValueError, {"clean_steps": -1}, "clean_steps=-1"),
        (TypeError, {"clean_steps": 1.0}, "clean_steps=1.0 must be an int"),
        (TypeError, {"clean_steps": True}, "clean_steps=True must be a number"),
        (ValueError, {"hysteresis_left": 0}, "hysteresis_left=0"),
        (ValueError, {"hysteresis_left": 3}, r"hysteresis_left=3 is outside 1\.\.2"),
        (ValueError, {"cur_scale": 1.0}, r"missing \[\], unknown \['cur_scale'\]"),
    ],
)
def test_an_impossible_state_is_rejected_by_name_and_changes_nothing(
    error: type, changed: dict[str, object], message: str
) -> None:
    scaler = DynamicScaler(DynamicScaling(window=7, hysteresis=2))
    scaler.update(OVERFLOW)
    before = scaler.state_dict()
    good = {"factor": 32.0, "clean_steps": 2, "hysteresis_left": 2}
    with pytest.raises(error, match=message):
        scaler.load_state_dict({**good, **changed})
    assert scaler.state_dict() == before


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ValueError, match=r"missing \['clean_steps'\], unknown \[\]"):
        DynamicScaler().load_state_dict({"factor": 2.0, "hysteresis_left": 1})


def test_what_is_not_a_mapping_is_rejected() -> None:
    with pytest.raises(TypeError, match="got a list; pass the result of state_dict"):
        DynamicScaler().load_state_dict([1, 2])


def test_a_state_is_prepared_without_a_change_and_takes_effect_later() -> None:
    scaler = DynamicScaler(DynamicScaling(initial=8.0))
    before = scaler.state_dict()
    commit = scaler.prepare_load({**before, "factor": 10**30})  # an int that float32 can have, beside the limit
    with pytest.raises(ValueError, match="factor"):
        scaler.prepare_load({**before, "factor": 10**400})
    assert scaler.state_dict() == before
    commit()
    assert float(scaler.factor) == pytest.approx(1e30)
    for other in (NoScaling(), StaticScaler(StaticScaling(4.0))):
        other.prepare_load(other.state_dict())()
        with pytest.raises((TypeError, ValueError)):
            other.prepare_load({"factor": 1.0})
