"""The laws of difficulty: golden numbers by hand, DeepSpeed's oddities among them."""

from __future__ import annotations

import pytest

from zengine.data import Custom, FixedDiscrete, FixedRoot
from zengine.data.order.schedules import with_custom_functions


def test_fixed_linear_by_hand() -> None:
    """floor(t/10 * 56 + 8): 8 13 19 24 30 36 41 47 52 58 64 69..., down to a multiple of 8, at most 64."""
    law = FixedRoot(low=8, high=64, steps=10, multiple=8)
    assert [law.at(step) for step in range(13)] == [8, 8, 16, 24, 24, 32, 40, 40, 48, 56, 64, 64, 64]


def test_fixed_root_by_hand() -> None:
    """Degree 2: floor(sqrt(t/16) * 48 + 16): 16 28 32.97 36.78 40 42.8 45.4 47.7 49.9 52 ... 64."""
    law = FixedRoot(low=16, high=64, steps=16, degree=2.0)
    assert [law.at(step) for step in (0, 1, 2, 3, 4, 9, 15, 16, 100)] == [16, 28, 32, 36, 40, 52, 62, 64, 64]


def test_a_maximum_that_is_no_multiple_is_reached_a_little_late() -> None:
    """floor(t/10 * 92 + 8) is 100 at step 10, down to 96; 109 at step 11, at most 100."""
    law = FixedRoot(low=8, high=100, steps=10, multiple=8)
    assert [law.at(step) for step in (9, 10, 11)] == [88, 96, 100]


def test_rounding_down_may_leave_less_than_the_minimum() -> None:
    assert FixedRoot(low=10, high=64, steps=10, multiple=8).at(0) == 8
    assert FixedRoot(low=4, high=64, steps=10, multiple=8).at(0) == 0


def test_fixed_discrete_by_hand() -> None:
    law = FixedDiscrete(difficulties=(1, 2, 3), until=(5, 10))
    assert [law.at(step) for step in (0, 5, 6, 10, 11, 99)] == [1, 1, 2, 2, 3, 3]
    assert FixedDiscrete(difficulties=(7,), until=()).at(3) == 7


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: FixedRoot(low=9, high=8, steps=1), "0 <= minimum <= maximum, got 9 and 8"),
        (lambda: FixedRoot(low=1, high=8, steps=0), r"steps \(0\)"),
        (lambda: FixedDiscrete(difficulties=(1, 2), until=(3, 4)), "2 difficulties need 1 steps, got 2"),
        (lambda: FixedDiscrete(difficulties=(1, 2, 3), until=(5, 5)), "last steps must increase"),
        (lambda: Custom(low=1, high=8).at(0), "set_custom_curriculum_learning_schedule"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(make, says: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=says):
        make()


def test_a_custom_law_stays_below_its_maximum() -> None:
    (law,) = with_custom_functions({"seqlen": Custom(low=1, high=8)}, lambda step: 3 * step).values()
    assert [law.at(step) for step in range(4)] == [0, 3, 6, 8]


def test_laws_go_to_the_metrics_they_are_named_for() -> None:
    schedules = {"a": Custom(low=1, high=8), "b": FixedRoot(low=1, high=2, steps=3), "c": Custom(low=1, high=9)}
    both = with_custom_functions(schedules, {"a": lambda _: 5, "c": lambda _: 6})
    assert (both["a"].at(0), both["b"], both["c"].at(0)) == (5, schedules["b"], 6)
    with pytest.raises(ValueError, match='with "schedule_type": "custom" are: a, c'):
        with_custom_functions(schedules, {"b": lambda _: 5})
    with pytest.raises(ValueError, match="no metric by name"):
        with_custom_functions(schedules, lambda _: 5)
