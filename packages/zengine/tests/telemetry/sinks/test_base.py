"""Sinks may fail, training may not."""

import logging
import warnings

import pytest

from zengine.telemetry.sinks.base import Sink, Sinks


class Recorder:
    def __init__(self, fail_at=()):
        self.fail_at = fail_at
        self.calls = []

    def begin(self, record):
        self.calls.append(record)

    def write(self, snapshot):
        self.calls.append(snapshot)
        if snapshot in self.fail_at:
            raise OSError(28, "No space left on device")

    def close(self):
        self.calls.append("close")


def test_a_failing_sink_is_named_once_with_place_and_cause_and_the_others_go_on(caplog):
    bad, good = Recorder(fail_at=(2, 3)), Recorder()
    sinks = Sinks()
    sinks.add("CSV files in runs/a", lambda: bad)
    sinks.add("console", lambda: good)
    sinks.begin("record")
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        for step in (1, 2, 3):
            sinks.write(step)
        sinks.close()
    (record,) = caplog.records
    assert record.name == "zengine.telemetry"
    assert "CSV files in runs/a" in record.getMessage()
    assert "OSError: [Errno 28] No space left on device" in record.getMessage()
    assert "training goes on" in record.getMessage()
    assert bad.calls == ["record", 1, 2]
    assert good.calls == ["record", 1, 2, 3, "close"]


def test_a_sink_that_cannot_be_opened_is_named_and_left_out(caplog):
    def refuse():
        raise PermissionError("read-only file system")

    sinks = Sinks()
    sinks.add("TensorBoard events in /runs", refuse)
    assert not sinks
    assert "TensorBoard events in /runs" in caplog.text
    assert "PermissionError: read-only file system" in caplog.text


def test_an_interrupt_is_not_swallowed():
    class Interrupted(Recorder):
        def write(self, snapshot):
            raise KeyboardInterrupt

    sinks = Sinks()
    sinks.add("x", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        sinks.write(1)


def test_the_base_of_all_sinks_is_the_identity():
    sink, sinks = Sink(), Sinks()
    sinks.add("nothing", lambda: sink)
    sinks.begin(None)
    sinks.write(None)
    sinks.write_events([("a", 1.0, 1)])
    assert sinks
    sinks.close()


def test_closing_twice_closes_once():
    sink, sinks = Recorder(), Sinks()
    sinks.add("x", lambda: sink)
    sinks.close()
    sinks.close()
    assert sink.calls == ["close"]
