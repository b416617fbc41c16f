"""Phases and the stopwatch: two families of timers, on a clock that the test moves."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from zengine.telemetry.spans import PHASES, NoStopwatch, Stopwatch, make_spans


class Rig:
    """A stopwatch on a clock moved by hand, with a trace that the test speaks through."""

    def __init__(self):
        self.now = 0.0
        self.events = []
        self.sinks = []
        self.stopwatch = Stopwatch(self.trace, lambda: self.events.append("synchronize"), lambda: self.now)
        self.spans = make_spans(self.stopwatch.observers())

    @contextmanager
    def trace(self, sink):
        self.sinks.append(sink)
        yield
        self.sinks.remove(sink)

    def spend(self, name, ms):
        with self.spans[name]:
            self.now += ms / 1e3

    def communicate(self, ms):
        for sink in self.sinks:
            sink(SimpleNamespace(op="all_reduce", nbytes=4, ms=ms + 1000.0, wait_ms=ms))


@pytest.fixture
def rig():
    return Rig()


def rounded(timers):
    return {name: round(ms, 6) for name, ms in timers.items()}


def timers(forward=0.0, backward=0.0, backward_allreduce=0.0, step=0.0):
    return {"forward": forward, "backward": backward, "backward_allreduce": backward_allreduce, "step": step}


def test_micro_is_the_last_micro_step_and_global_is_the_window(rig):
    for ms in (10, 20):
        rig.spend("forward", ms)
        rig.spend("backward", 2 * ms)
        rig.stopwatch.micro_step_end()
    assert rounded(rig.stopwatch.micro_ms()) == timers(forward=20, backward=40)
    assert rounded(rig.stopwatch.total_ms()) == timers(forward=30, backward=60)


@pytest.mark.parametrize("order", [("micro_step_end", "step_end"), ("step_end", "micro_step_end")])
def test_at_a_boundary_the_two_ends_may_come_in_either_order(rig, order):
    seen = {}
    for window in range(2):
        for ms in (1, 5):
            rig.spend("forward", ms)
            if ms == 1:
                rig.stopwatch.micro_step_end()
        rig.spend("step", 7)
        for end in order:
            if end == "step_end":
                seen[window] = rounded(rig.stopwatch.micro_ms()), rounded(rig.stopwatch.total_ms())
            getattr(rig.stopwatch, end)()
    assert seen[0] == seen[1] == (timers(forward=5, step=7), timers(forward=6, step=7))


def test_a_phase_entered_again_while_open_is_timed_once(rig):
    with rig.spans["forward"]:
        rig.now += 0.001
        rig.spend("forward", 2)
        rig.now += 0.004
    assert rounded(rig.stopwatch.total_ms()) == timers(forward=7)


def test_a_phase_nested_in_another_counts_in_both(rig):
    with rig.spans["backward"]:
        rig.spend("forward", 3)
        rig.now += 0.001
    assert rounded(rig.stopwatch.total_ms()) == timers(forward=3, backward=4)


def test_communication_is_counted_once_however_phases_nest_and_not_outside_of_them(rig):
    rig.communicate(100)
    with rig.spans["backward"]:
        rig.communicate(2)
        with rig.spans["forward"]:
            rig.communicate(3)
    rig.communicate(100)
    with rig.spans["step"]:
        rig.communicate(4)
    assert rounded(rig.stopwatch.total_ms())["backward_allreduce"] == 9
    assert rig.sinks == []


def test_an_exception_in_a_phase_closes_it_and_the_next_is_clean(rig):
    def fail():
        rig.now += 0.001
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"), rig.spans["backward"], rig.spans["backward"]:
        fail()
    assert rig.sinks == []
    rig.now += 1
    rig.spend("backward", 2)
    assert rounded(rig.stopwatch.total_ms()) == timers(backward=3)


def test_the_device_is_waited_for_at_both_edges_of_the_outermost_entry(rig):
    with rig.spans["forward"]:
        rig.events.append("work")
        rig.spend("forward", 1)
    assert rig.events == ["synchronize", "work", "synchronize"]


def test_a_device_that_fails_at_the_end_of_a_phase_leaves_it_closed(rig):
    def fail():
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"), rig.spans["forward"]:
        rig.stopwatch._synchronize = fail
    rig.stopwatch._synchronize = lambda: None
    assert rig.sinks == []
    rig.spend("forward", 2)
    assert rounded(rig.stopwatch.total_ms()) == timers(forward=2)


def test_reset_forgets_what_was_measured(rig):
    rig.spend("forward", 2)
    rig.stopwatch.micro_step_end()
    rig.stopwatch.reset()
    assert rig.stopwatch.micro_ms() == rig.stopwatch.total_ms() == timers()


def test_without_observers_every_phase_is_one_and_the_same_empty_context():
    spans = make_spans(NoStopwatch().observers())
    assert set(spans) == set(PHASES)
    assert len({id(span) for span in spans.values()}) == 1
    with spans["forward"], spans["forward"]:
        pass


def test_the_identity_reports_no_timers_at_all():
    stopwatch = NoStopwatch()
    stopwatch.micro_step_end()
    stopwatch.step_end()
    stopwatch.reset()
    assert stopwatch.micro_ms() == stopwatch.total_ms() == {}
