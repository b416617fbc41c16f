"""The tally of collectives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from zengine.telemetry.comms import CommsLog, Messages, NoCommsLog, Tally, format_messages, log_collective, plain_name


def record(op: str, nbytes: int = 8, ms: float = 1.0, wait_ms: float = 0.5, label: str = "") -> Any:
    return SimpleNamespace(op=op, nbytes=nbytes, ms=ms, wait_ms=wait_ms, group_size=4, label=label)


class Wire:
    """A trace that the test speaks through."""

    def __init__(self) -> None:
        self.sinks: list[Callable[[Any], None]] = []

    @contextmanager
    def trace(self, sink: Callable[[Any], None]) -> Iterator[None]:
        self.sinks.append(sink)
        yield
        self.sinks.remove(sink)

    def send(self, *args: Any) -> None:
        for sink in self.sinks:
            sink(record(*args))


def test_collectives_are_added_up_by_operation_in_each_step() -> None:
    wire = Wire()
    log = CommsLog(wire.trace)
    wire.send("all_reduce", 100, 1.0)
    wire.send("all_reduce", 300, 2.0)
    assert log.step_end() == {"all_reduce": Tally(count=2, nbytes=400, ms=3.0, wait_ms=1.0)}
    wire.send("all_gather", 8, 0.5)
    assert log.step_end() == {"all_gather": Tally(count=1, nbytes=8, ms=0.5, wait_ms=0.5)}
    assert log.step_end() == {}


def test_in_total_they_are_added_up_by_operation_and_size() -> None:
    wire = Wire()
    log = CommsLog(wire.trace)
    for size in (100, 300, 300):
        wire.send("all_reduce", size, 1.0)
    assert [(each.op, each.size_bytes, each.tally.count) for each in log.messages()] == [
        ("all_reduce", 300, 2),
        ("all_reduce", 100, 1),
    ]
    assert [line.split()[:2] for line in log.table().splitlines()[2:]] == [
        ["all_reduce", "300"],
        ["all_reduce", "100"],
    ]


def test_only_the_operations_that_were_asked_for_are_counted() -> None:
    wire = Wire()
    log = CommsLog(wire.trace, ["all_gather_into_tensor"])
    wire.send("all_gather")
    wire.send("all_reduce")
    assert list(log.step_end()) == ["all_gather"]


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("all_gather_into_tensor", "all_gather"),
        ("all_gather_base", "all_gather"),
        ("reduce_scatter_tensor", "reduce_scatter"),
        ("all_to_all_single", "all_to_all"),
        ("all_reduce_coalesced", "all_reduce"),
        ("broadcast", "broadcast"),
    ],
)
def test_an_operation_is_known_by_the_names_of_its_variants(name: str, plain: str) -> None:
    assert plain_name(name) == plain


def test_after_close_nothing_is_counted() -> None:
    wire = Wire()
    log = CommsLog(wire.trace)
    log.close()
    log.close()
    assert wire.sinks == []


@pytest.mark.parametrize(("op", "factor"), [("all_reduce", 1.5), ("all_gather", 0.75), ("broadcast", 1.0)])
def test_the_bus_carries_what_crosses_links(op: str, factor: float) -> None:
    message = Messages(op, 1_000_000, 4, Tally(count=1, nbytes=1_000_000, ms=1.0))
    assert message.tally.gb_per_s == 1.0
    assert message.bus_gb_per_s == factor


def test_the_table_gives_size_time_and_bandwidths() -> None:
    messages = [
        Messages("all_reduce", 2**20, 2, Tally(count=3, nbytes=3 * 2**20, ms=2.0, wait_ms=0.5)),
        Messages("barrier", 0, 2, Tally(count=1)),
    ]
    header, reduce, barrier = format_messages(messages).splitlines()[1:]
    assert header.split()[:5] == ["operation", "size", "ranks", "count", "MiB"]
    assert reduce.split() == ["all_reduce", "1", "MiB", "2", "3", "3.00", "2.00", "0.50", "1.57", "1.57"]
    assert barrier.split() == ["barrier", "0", "B", "2", "1", "0.00", "0.00", "0.00", "0", "0"]
    assert len({len(line) for line in (header, reduce, barrier)}) == 1


def test_a_collective_is_told_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zengine"):
        log_collective(record("all_reduce", 2048, label="bucket 3"), with_label=True)
        log_collective(record("all_reduce", 2048, label="bucket 3"), with_label=False)
    assert caplog.messages == [
        "all_reduce [bucket 3]: 2 KiB over 4 ranks, 1.00 ms, waited 0.50 ms",
        "all_reduce: 2 KiB over 4 ranks, 1.00 ms, waited 0.50 ms",
    ]


def test_the_table_of_a_silent_world_says_so() -> None:
    assert CommsLog(Wire().trace).table() == "communication: none"


def test_the_identity_has_no_table() -> None:
    log = NoCommsLog()
    assert log.table() == ""
    assert log.messages() == []
    assert log.step_end() == {}
    log.close()
