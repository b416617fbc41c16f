"""The learning-rate laws of DeepSpeed's five schedules, as pure functions.

`t` is DeepSpeed's `last_batch_iteration`: -1 before the first applied update, 0 after it.  The next update runs with
the value at t, so the number of applied updates and the parameters describe a run completely: nothing accumulates,
and a resumed run cannot drift.

[Note: exact peak] The compatible laws have four oddities: the first *two* updates run at the minimum (t = -1 and
t = 0; with a minimum of 0 two batches are wasted; the cosine's first runs at 0 for any minimum); the cosine starts
one step below the peak and never reaches it; OneCycle's momentum begins at its minimum and then jumps to the mirrored
triangle; and it sets betas[1] to 0.99.  The functions `exact_*` are the same curves without these, counting the next
update k = t + 1 from zero: update k of an n-update warm-up has the fraction (k + 1) / n, so the first one moves and
update n - 1 runs at the peak; decay and cosine start there.
"""

from __future__ import annotations

import math

__all__ = [
    "cosine_ratio",
    "decay_fraction",
    "exact_cosine_ratio",
    "exact_decay_fraction",
    "exact_warmup_fraction",
    "inverse_decay",
    "range_test_factor",
    "triangle",
    "warmup_fraction",
]


def warmup_fraction(t: int, num_steps: int, kind: str) -> float:
    """0 at t <= 0, 1 from t = num_steps on (num_steps >= 2).  kind: "log" or "linear".

    The logarithmic form, ln(t + 1) / ln(num_steps), reaches 1 one step earlier.
    """
    if t < 0:
        return 0.0
    if t >= num_steps:
        return 1.0
    return math.log(t + 1) / math.log(num_steps) if kind == "log" else t / num_steps


def exact_warmup_fraction(t: int, num_steps: int, kind: str) -> float:
    """As warmup_fraction, but update 0 is above 0 and update num_steps - 1 is at 1 (num_steps >= 0)."""
    k = t + 1
    if k + 1 >= num_steps:
        return 1.0
    return math.log(k + 2) / math.log(num_steps + 1) if kind == "log" else (k + 1) / num_steps


def decay_fraction(t: int, num_steps: int, total: int, kind: str) -> float:
    """Warm-up, then a straight line from 1 at t = num_steps to 0 at t = total."""
    if t < num_steps:
        return warmup_fraction(t, num_steps, kind)
    return max(0.0, (total - t) / max(1, total - num_steps))


def exact_decay_fraction(t: int, num_steps: int, total: int, kind: str) -> float:
    """As decay_fraction, from 1 at update num_steps - 1 to 0 after update total - 1, the last."""
    k, peak = t + 1, max(0, num_steps - 1)
    if k < peak:
        return exact_warmup_fraction(t, num_steps, kind)
    return min(1.0, max(0.0, (total - k) / max(1, total - peak)))


def cosine_ratio(t: int, num_steps: int, total: int, kind: str, lows: tuple[float, float]) -> float:
    """0 at t = -1, warm-up from lows[0] to 1, then half a cosine down to lows[1] at t = total - 1."""
    warm_low, cosine_low = lows
    if t < 0:
        return 0.0
    if t < num_steps:
        return warm_low + (1 - warm_low) * warmup_fraction(t, num_steps, kind)
    return _half_cosine((t - num_steps + 1) / max(1, total - num_steps), cosine_low)


def exact_cosine_ratio(t: int, num_steps: int, total: int, kind: str, lows: tuple[float, float]) -> float:
    """As cosine_ratio, with update num_steps - 1 at 1 and update total - 1, the last, at lows[1]."""
    warm_low, cosine_low = lows
    k, peak = t + 1, max(0, num_steps - 1)
    if k < peak:
        return warm_low + (1 - warm_low) * exact_warmup_fraction(t, num_steps, kind)
    return _half_cosine((k - peak) / max(1, total - 1 - peak), cosine_low)


def triangle(t: int, first: int, second: int, stairs: tuple[int, int] = (0, 0)) -> float:
    """0 at t = -1, up to 1 after `first` updates, down to 0 after `second` more, and 0 from there on.

    If `second` is 0 the peak is not reached: the cycle ends there.  stairs: the numbers of steps of the rise and the
    fall, each at the height of its lower end; 0 is a straight line.
    """
    k = t + 1
    if k >= first + second:
        return 0.0
    return _stepped(k, first, stairs[0]) if k <= first else _stepped(first + second - k, second, stairs[1])


def inverse_decay(k: int, rate: float, interval: int) -> float:
    """1 + rate * k / interval, k updates after a cycle; 1 when interval is 0 (no decay)."""
    return 1.0 + rate * k / interval if interval else 1.0


def range_test_factor(t: int, size: int, rate: float, staircase: bool) -> float:
    """1 + rate * x with x = (t + 1) / size, floored for a staircase."""
    intervals = (t + 1) / size
    return 1.0 + rate * (math.floor(intervals) if staircase else intervals)


def _half_cosine(progress: float, low: float) -> float:
    """Return half a cosine: 1 at progress 0, `low` from progress 1 on."""
    return low + (1 - low) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


def _stepped(k: int, size: int, stairs: int) -> float:
    """Return k / size, rounded down to a whole number of equal stairs."""
    return k * stairs // size / stairs if stairs else k / size
