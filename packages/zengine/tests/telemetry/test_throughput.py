"""Samples a second, on a clock that the test moves."""

import pytest

from zengine.telemetry.throughput import NoThroughput, Rate, Throughput


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def run(throughput, clock, steps):
    """Step after step of (seconds, samples); the rates."""
    samples, rates = 0, []
    for seconds, count in steps:
        clock.now += seconds
        samples += count
        rates.append(throughput.step_end(samples))
    return rates


def test_the_first_two_steps_are_not_measured(clock):
    throughput = Throughput(clock)
    rates = run(throughput, clock, [(50, 8), (9, 8), (0.5, 8), (0.25, 8)])
    assert [bool(rate) for rate in rates] == [False, False, True, True]
    assert [rate.samples_per_s for rate in rates[2:]] == [16, 32]
    assert [rate.step_ms for rate in rates[2:]] == [500, 250]
    assert throughput.total == Rate(samples=16, ms=750, steps=2)
    assert throughput.total.step_ms == 375


def test_a_batch_that_changes_its_size_is_counted_as_it_is(clock):
    rates = run(Throughput(clock), clock, [(1, 8), (1, 8), (1, 8), (1, 24)])
    assert [rate.samples for rate in rates[2:]] == [8, 24]


def test_what_is_paused_does_not_count_even_when_it_raises(clock):
    throughput = Throughput(clock)
    run(throughput, clock, [(1, 8), (1, 8)])

    def fail():
        clock.now += 60
        raise KeyError

    with pytest.raises(KeyError), throughput.paused():
        fail()
    with throughput.paused(), throughput.paused():
        clock.now += 10
    clock.now += 2
    assert throughput.step_end(24) == Rate(samples=8, ms=2000, steps=1)
    clock.now += 1
    assert throughput.step_end(32).ms == 1000


def test_after_a_reset_the_warm_up_begins_again(clock):
    throughput = Throughput(clock)
    run(throughput, clock, [(1, 8)] * 4)
    throughput.reset()
    clock.now += 1
    assert not throughput.step_end(100_000)
    clock.now += 1
    assert not throughput.step_end(100_008)
    clock.now += 1
    assert throughput.step_end(100_016).samples == 8
    assert throughput.total.steps == 1


def test_an_unmeasured_rate_is_zero_not_a_division_by_zero():
    assert not Rate()
    assert Rate().samples_per_s == Rate().step_ms == 0


def test_the_identity_measures_nothing():
    throughput = NoThroughput()
    with throughput.paused():
        pass
    throughput.reset()
    assert not throughput.step_end(8)
    assert not throughput.total
