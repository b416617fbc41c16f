"""Phases and the stopwatch: two families of timers, on a clock that the test moves."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from zengine.telemetry.instants import DeviceInstants, HostInstants
from zengine.telemetry.spans import HOST_PHASES, PHASES, TIMERS, NoStopwatch, Stopwatch, make_spans


class Rig:
    """A stopwatch on a clock moved by hand, with a trace that the test speaks through."""

    def __init__(self):
        self.now = 0.0
        self.sinks = []
        clock = HostInstants(lambda: self.now)
        self.stopwatch = Stopwatch(self.trace, clock, clock)
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
            sink(SimpleNamespace(op="all_reduce", nbytes=4, ms=ms + 1000.0, wait_ms=ms, stall=()))


@pytest.fixture
def rig():
    return Rig()


def rounded(timers):
    return {name: round(ms, 6) for name, ms in timers.items()}


def timers(**measured):
    inner = measured.get("backward", 0.0) - measured.get("backward_allreduce", 0.0)
    of_the_step = [timer for timer in TIMERS if timer not in HOST_PHASES]
    return {**dict.fromkeys(of_the_step, 0.0), "backward_inner": inner, **measured}


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


class Stream:
    """A device that works behind the host's back: an event passes when the stream gets there, on its own clock."""

    def __init__(self):
        self.queue, self.now, self.num_waits = [], 0.0, 0

    def work(self, ms):
        self.queue.append(ms)

    def event(self):
        return Event(self)

    def run_to(self, event):
        self.num_waits += 1
        while event in self.queue:
            item = self.queue.pop(0)
            if isinstance(item, Event):
                item.passed_at = self.now
            else:
                self.now += item


class Event:
    def __init__(self, stream):
        self.stream = stream

    def record(self):
        self.passed_at = None
        self.stream.queue.append(self)

    def query(self):
        return self.passed_at is not None

    def synchronize(self):
        self.stream.run_to(self)

    def elapsed_time(self, later):
        return later.passed_at - self.passed_at


def test_phases_of_a_device_are_its_own_times_and_the_host_waits_once_a_boundary(rig):
    stream = Stream()
    rig.stopwatch._device = DeviceInstants(stream.event)
    for _ in range(2):
        for name, ms in (("forward", 5), ("backward", 11)):
            with rig.spans[name]:
                stream.work(ms)
        rig.stopwatch.micro_step_end()
    with rig.spans["step"]:
        stream.work(2)
    rig.spend("data", 7)
    assert stream.num_waits == 0
    assert rounded(rig.stopwatch.total_ms()) == timers(forward=10, backward=22, step=2, data=7)
    assert rig.stopwatch.micro_ms()["step"] == 2
    assert stream.num_waits == 1
    rig.stopwatch.step_end()
    assert rounded(rig.stopwatch.total_ms()) == timers()
    assert stream.num_waits == 1


def test_where_a_stream_waits_for_a_collective_its_own_time_counts(rig):
    compute, other = Stream(), Stream()
    rig.stopwatch._device = DeviceInstants(compute.event)
    with rig.spans["backward"]:
        for stream in (compute, other):
            stall = stream.event(), stream.event()
            stall[0].record()
            stream.work(4)
            stall[1].record()
            for sink in rig.sinks:
                sink(SimpleNamespace(op="all_reduce", nbytes=4, ms=9.0, wait_ms=0.01, stall=stall))
        compute.work(10)
    measured = rounded(rig.stopwatch.total_ms())
    assert measured["backward"] == 14
    assert measured["backward_allreduce"] == 8
    assert (compute.num_waits, other.num_waits) == (1, 1)


def test_a_device_that_fails_at_the_end_of_a_phase_leaves_it_closed(rig):
    def fail():
        raise RuntimeError("device lost")

    works = rig.stopwatch._device
    with pytest.raises(RuntimeError, match="device lost"), rig.spans["forward"]:
        rig.stopwatch._device = DeviceInstants(fail)
    rig.stopwatch._device = works
    assert rig.sinks == []
    rig.spend("forward", 2)
    assert rounded(rig.stopwatch.total_ms()) == timers(forward=2)


def test_waiting_for_data_and_saving_are_timed_beside_the_step_and_open_no_trace(rig):
    rig.spend("data", 3)
    rig.spend("forward", 1)
    with rig.spans["checkpoint"]:
        rig.now += 0.02
        rig.communicate(5)
    assert rounded(rig.stopwatch.total_ms()) == timers(data=3, forward=1, checkpoint=20)


def test_the_inner_backward_is_without_its_own_waits_alone(rig):
    with rig.spans["backward"]:
        rig.now += 0.010
        rig.communicate(4)
    with rig.spans["step"]:
        rig.communicate(3)
    measured = rounded(rig.stopwatch.total_ms())
    assert (measured["backward_inner"], measured["backward_allreduce"]) == (6, 7)


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
