from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoptim.schedules import laws

sizes = st.integers(min_value=2, max_value=50)
kinds = st.sampled_from(["log", "linear"])


def curve(law: object, count: int, *args: object) -> list[float]:
    """The law's values for updates 0 .. count - 1."""
    return [law(t, *args) for t in range(-1, count - 1)]  # type: ignore[operator]


def rises(values: list[float]) -> bool:
    return all(a <= b + 1e-12 for a, b in itertools.pairwise(values))


@given(n=sizes, kind=kinds)
def test_warmup_rises_from_zero_to_one_and_stays(n: int, kind: str) -> None:
    values = curve(laws.warmup_fraction, 2 * n + 3, n, kind)
    assert rises(values)
    assert values[:2] == [0.0, 0.0], "the compatible law spends two updates at the minimum"
    assert values[n + 1 :] == [1.0] * (n + 2)


@given(n=st.integers(min_value=0, max_value=50), kind=kinds)
def test_the_exact_warmup_moves_at_once_and_reaches_one_at_update_n_minus_1(n: int, kind: str) -> None:
    values = curve(laws.exact_warmup_fraction, n + 5, n, kind)
    assert rises(values)
    assert values[0] > 0
    assert all(value < 1 for value in values[: max(0, n - 1)])
    assert all(value == 1 for value in values[max(0, n - 1) :])


@given(n=sizes, extra=st.integers(min_value=0, max_value=50), kind=kinds)
def test_decay_reaches_zero_at_the_end_and_not_before(n: int, extra: int, kind: str) -> None:
    total = n + extra
    for law, end in ((laws.decay_fraction, total + 1), (laws.exact_decay_fraction, total)):
        values = curve(law, end + 4, n, total, kind)
        assert max(values) == (1.0 if extra or law is laws.exact_decay_fraction else max(values))
        assert values[end:] == [0.0] * 4
        assert values[end - 1] > 0 or not extra
        assert rises(values[:n])
        assert rises(values[n + 1 :][::-1])


@given(n=sizes, extra=st.integers(min_value=2, max_value=50), kind=kinds)
def test_the_exact_cosine_touches_its_peak_and_the_compatible_one_does_not(n: int, extra: int, kind: str) -> None:
    total, lows = n + extra, (0.0, 0.1)
    exact = curve(laws.exact_cosine_ratio, total, n, total, kind, lows)
    assert exact[n - 1] == 1.0
    assert exact[-1] == pytest.approx(0.1)
    assert exact[-2] > 0.1 + 1e-6
    compatible = curve(laws.cosine_ratio, total + 3, n, total, kind, lows)
    assert max(compatible[n + 1 :]) < 1.0
    assert compatible[total:] == pytest.approx([0.1] * 3)


@pytest.mark.parametrize("law", [laws.warmup_fraction, laws.exact_warmup_fraction])
def test_the_logarithm_is_ahead_of_the_straight_line(law: object) -> None:
    assert all(law(t, 10, "log") > law(t, 10, "linear") for t in range(1, 8))  # type: ignore[operator]


@given(first=st.integers(1, 30), second=st.integers(1, 30))
def test_the_triangle_peaks_once_and_ends_at_zero(first: int, second: int) -> None:
    values = curve(laws.triangle, first + second + 3, first, second)
    assert values[0] == 0.0
    assert values.index(max(values)) == first
    assert values[first] == 1.0
    assert values[first + second :] == [0.0] * 3


def test_stairs_are_flat_between_their_edges() -> None:
    assert curve(laws.triangle, 13, 6, 6, (2, 3)) == pytest.approx(
        [0, 0, 0, 0.5, 0.5, 0.5, 1, 2 / 3, 2 / 3, 1 / 3, 1 / 3, 0, 0]
    )


@given(first=st.integers(1, 30), second=st.integers(0, 30), stairs=st.tuples(st.integers(0, 5), st.integers(0, 5)))
def test_a_stair_is_the_highest_one_below_the_straight_line(first: int, second: int, stairs: tuple[int, int]) -> None:
    for t in range(-1, first + second + 2):
        straight, k = laws.triangle(t, first, second), t + 1
        count = stairs[0] if k <= first else stairs[1]
        below = [n / count for n in range(count + 1) if n / count <= straight + 1e-12] if count else [straight]
        assert laws.triangle(t, first, second, stairs) == max(below)


def test_a_fall_of_no_length_ends_the_cycle_where_its_peak_would_be() -> None:
    assert curve(laws.triangle, 6, 4, 0) == [0, 0.25, 0.5, 0.75, 0, 0]
    assert curve(laws.triangle, 3, 1, 0) == [0, 0, 0]


def test_inverse_decay_without_an_interval_is_none() -> None:
    assert laws.inverse_decay(5, 0.5, 0) == 1.0
    assert laws.inverse_decay(4, 0.5, 2) == 2.0


def test_the_range_test_grows_in_a_line_or_in_stairs() -> None:
    assert curve(laws.range_test_factor, 4, 2, 3.0, False) == [1.0, 2.5, 4.0, 5.5]
    assert curve(laws.range_test_factor, 4, 2, 3.0, True) == [1.0, 1.0, 4.0, 4.0]


def test_degenerate_lengths_do_not_divide_by_zero() -> None:
    assert laws.decay_fraction(5, 4, 4, "log") == 0.0
    assert laws.cosine_ratio(5, 4, 4, "log", (0.0, 0.5)) == pytest.approx(0.5)
    assert laws.exact_decay_fraction(-1, 0, 1, "linear") == 1.0
    assert laws.exact_cosine_ratio(-1, 1, 1, "linear", (0.0, 0.5)) == 1.0
    assert math.isfinite(laws.exact_warmup_fraction(-1, 1, "log"))
