"""The tally of collectives."""

from contextlib import contextmanager
from types import SimpleNamespace

from zengine.telemetry.comms import CommsLog, NoCommsLog, Tally, format_table


class Wire:
    """A trace that the test speaks through."""

    def __init__(self):
        self.sinks = []

    @contextmanager
    def trace(self, sink):
        self.sinks.append(sink)
        yield
        self.sinks.remove(sink)

    def send(self, op, nbytes, ms):
        for sink in self.sinks:
            sink(SimpleNamespace(op=op, nbytes=nbytes, ms=ms))


def test_collectives_are_added_up_by_operation_in_total_and_by_step():
    wire = Wire()
    log = CommsLog(wire.trace)
    wire.send("all_reduce", 100, 1.0)
    wire.send("all_reduce", 300, 2.0)
    assert log.step_end() == {"all_reduce": Tally(count=2, nbytes=400, ms=3.0)}
    wire.send("all_gather", 8, 0.5)
    assert log.step_end() == {"all_gather": Tally(count=1, nbytes=8, ms=0.5)}
    assert log.step_end() == {}
    assert [line.split()[:2] for line in log.table().splitlines()[2:]] == [["all_reduce", "2"], ["all_gather", "1"]]


def test_after_close_nothing_is_counted():
    wire = Wire()
    log = CommsLog(wire.trace)
    log.close()
    log.close()
    assert wire.sinks == []


def test_the_table_gives_size_time_and_payload_bandwidth():
    table = format_table({"all_reduce": Tally(count=3, nbytes=3 * 2**20, ms=2.0), "barrier": Tally(count=1)})
    header, reduce, barrier = table.splitlines()[1:]
    assert header.split() == ["operation", "count", "MiB", "ms", "GB/s"]
    assert reduce.split() == ["all_reduce", "3", "3.00", "2.00", "1.57"]
    assert barrier.split() == ["barrier", "1", "0.00", "0.00", "0.00"]
    assert len({len(line) for line in (header, reduce, barrier)}) == 1


def test_the_table_of_a_silent_world_says_so():
    assert CommsLog(Wire().trace).table() == "communication: none"


def test_the_identity_has_no_table():
    log = NoCommsLog()
    assert log.table() == ""
    assert log.step_end() == {}
    log.close()
