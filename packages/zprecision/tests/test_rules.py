"""The rules of loss scaling, and the law of the dynamic one against a twin written another way."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zprecision import DynamicScaler, DynamicScaling, StaticScaling, Unscaled
from zprecision.rules import advance


def flag(overflow: bool) -> torch.Tensor:
    return torch.tensor(float(overflow))


def state_of(scaler: DynamicScaler) -> tuple[float, int]:
    return scaler.factor.item(), scaler.hysteresis_left.item()


def float32(value: float) -> float:
    return ctypes.c_float(value).value


class Twin:
    """The law as the reference tells it: unbounded step numbers and a modulus, on host numbers."""

    def __init__(self, rule: DynamicScaling) -> None:
        self.rule = rule
        self.factor = float32(rule.initial)
        self.left = rule.hysteresis
        self.step = 0
        self.last_overflow = -1

    def update(self, overflow: bool) -> None:
        rule = self.rule
        if overflow:
            if self.left == 1:
                lowered = float32(self.factor * float32(1.0 / rule.growth))
                self.factor = max(lowered, float32(rule.floor))
            else:
                self.left -= 1
            self.last_overflow = self.step
        else:
            if rule.consecutive_hysteresis:
                self.left = rule.hysteresis
            clean = self.step - self.last_overflow - 1
            if clean > 0 and clean % rule.window == 0:
                self.left = rule.hysteresis
                raised = float32(self.factor * float32(rule.growth))
                self.factor = raised if math.isfinite(raised) else self.factor
        self.step += 1


RULES = st.builds(
    DynamicScaling,
    initial=st.sampled_from([1.0, 16.0, 65536.0, 1000.25, 2.0**126]),
    growth=st.sampled_from([2.0, 4.0, 1.5, 3.0]),
    window=st.integers(1, 7),
    hysteresis=st.integers(1, 4),
    consecutive_hysteresis=st.booleans(),
    floor=st.sampled_from([1.0, 0.25, 0.1, 2.0**-20]),
)
# Long clean runs as well as storms: a fair coin would hardly ever fill a window.
TRACES = st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=12).map(
    lambda runs: [overflow for overflow, length in runs for _ in range(length)]
)


@settings(max_examples=150, deadline=None)
@given(rule=RULES, trace=TRACES)
def test_the_law_equals_its_twin_for_all_settings_and_traces(rule: DynamicScaling, trace: list[bool]) -> None:
    scaler, twin = DynamicScaler(rule), Twin(rule)
    for overflow in trace:
        scaler.update(flag(overflow))
        twin.update(overflow)
        assert state_of(scaler) == (twin.factor, twin.left)
        assert float32(rule.floor) <= scaler.factor.item() < math.inf
        assert 0 <= scaler.clean_steps.item() <= rule.window
        assert 1 <= scaler.hysteresis_left.item() <= rule.hysteresis


# The reference's run: start 16, window 3, hysteresis 2; o = overflow, g = clean; factor/counter after the step.
GOLDEN = [
    *("g16/2", "g16/2", "g16/2", "g32/2", "g32/2", "g32/2", "o32/1", "g32/1", "g32/1"),
    *("g32/1", "g64/2", "o64/1", "o32/1", "o16/1", "g16/1", "g16/1", "g16/1", "g32/2"),
]


def test_the_golden_trace_of_18_steps() -> None:
    scaler = DynamicScaler(DynamicScaling(initial=16, window=3, hysteresis=2))
    lines = []
    for step in GOLDEN:
        scaler.update(flag(step[0] == "o"))
        factor, counter = state_of(scaler)
        lines.append(f"{step[0]}{factor:g}/{counter}")
    assert len(lines) == 18
    assert lines == GOLDEN


def test_three_overflows_in_a_row_spend_the_counter_once_and_then_halve_each_time() -> None:
    scaler = DynamicScaler(DynamicScaling(initial=64, hysteresis=2))
    seen = []
    for _ in range(3):
        scaler.update(flag(True))
        seen.append(state_of(scaler))
    assert seen == [(64, 1), (32, 1), (16, 1)]


def test_growth_takes_one_clean_step_more_after_the_start_than_after_a_growth() -> None:
    scaler = DynamicScaler(DynamicScaling(initial=1, window=4))
    factors = []
    for _ in range(13):
        scaler.update(flag(False))
        factors.append(scaler.factor.item())
    assert [step for step in range(1, 13) if factors[step] > factors[step - 1]] == [4, 8, 12]


def test_a_window_of_one_grows_with_the_second_clean_step() -> None:
    scaler = DynamicScaler(DynamicScaling(initial=1, window=1))
    factors = []
    for overflow in (False, False, False, True, False, False):
        scaler.update(flag(overflow))
        factors.append(scaler.factor.item())
    assert factors == [1, 2, 4, 4, 4, 8]


def test_consecutive_hysteresis_forgives_overflows_that_are_apart() -> None:
    factors = {}
    for consecutive in (False, True):
        rule = DynamicScaling(initial=64, window=100, hysteresis=2, consecutive_hysteresis=consecutive)
        scaler = DynamicScaler(rule)
        for overflow in (True, False, True, False, True):
            scaler.update(flag(overflow))
        factors[consecutive] = scaler.factor.item()
    assert factors == {False: 16.0, True: 64.0}


def test_the_factor_stops_at_the_floor_even_when_halving_would_pass_it() -> None:
    scaler = DynamicScaler(DynamicScaling(initial=5, hysteresis=1, floor=3))
    for _ in range(4):
        scaler.update(flag(True))
    assert scaler.factor.item() == 3


def test_growth_never_reaches_infinity_from_which_nothing_comes_back() -> None:
    scaler = DynamicScaler(DynamicScaling(initial=2.0**127, window=1, hysteresis=1))
    for _ in range(5):
        scaler.update(flag(False))
    assert scaler.factor.item() == 2.0**127
    scaler.update(flag(True))
    assert scaler.factor.item() == 2.0**126


def test_the_law_is_pure_and_keeps_dtypes() -> None:
    rule = DynamicScaling()
    before = (torch.tensor(8.0), torch.tensor(3, dtype=torch.int32), torch.tensor(2, dtype=torch.int32))
    copies = [tensor.clone() for tensor in before]
    after = advance(rule, *before, torch.tensor(True))
    assert [(t.dtype, t.shape) for t in after] == [(t.dtype, t.shape) for t in before]
    assert all(torch.equal(old, copy) for old, copy in zip(before, copies))


@pytest.mark.parametrize(
    ("error", "given_", "message"),
    [
        (ValueError, {"window": 0}, r"DynamicScaling\(window=0\): window must be an integer from 1"),
        (TypeError, {"window": 1000.0}, r"window=1000.0.*integer.*float.*1000"),
        (TypeError, {"window": True}, "window=True.*integer"),
        (ValueError, {"hysteresis": 0}, "hysteresis=0"),
        (ValueError, {"hysteresis": 2**31}, "hysteresis=2147483648"),
        (ValueError, {"growth": 1.0}, "growth=1.0.*> 1"),
        (ValueError, {"growth": 1.0 + 1e-12}, "growth.*float32"),
        (ValueError, {"initial": -1.0}, "initial=-1.0.*> 0"),
        (ValueError, {"initial": math.inf}, "initial=inf"),
        (ValueError, {"initial": math.nan}, "initial=nan"),
        (ValueError, {"initial": 1e39}, "initial=1e\\+39.*float32"),
        (TypeError, {"initial": "2**16"}, r"initial='2\*\*16'.*number.*str"),
        (ValueError, {"floor": 0.0}, "floor=0.0"),
        (TypeError, {"consecutive_hysteresis": 1}, "consecutive_hysteresis=1.*True or False"),
        (ValueError, {"initial": 0.5}, "initial=0.5, floor=1.0.*below floor"),
    ],
)
def test_impossible_settings_are_rejected_by_name(error: type, given_: dict, message: str) -> None:
    with pytest.raises(error, match=message):
        DynamicScaling(**given_)


def test_a_static_factor_must_be_positive_and_finite() -> None:
    with pytest.raises(ValueError, match=r"StaticScaling\(factor=0\).*> 0"):
        StaticScaling(0)
    with pytest.raises(TypeError, match="factor='128'"):
        StaticScaling("128")


def test_rules_are_values() -> None:
    assert DynamicScaling(window=5) == DynamicScaling(window=5)
    assert len({Unscaled(), Unscaled(), StaticScaling(2), StaticScaling(2.0)}) == 2
    with pytest.raises(AttributeError):
        DynamicScaling().window = 3
