"""Ranks side by side."""

from __future__ import annotations

import pytest

from zengine.telemetry.comms import Messages, Tally
from zengine.telemetry.stragglers import format_waits, from_json, log_summary, name_straggler, rank_waits, to_json


def rank(**waits: float) -> list[Messages]:
    return [Messages(op, 8, 2, Tally(count=1, nbytes=8, ms=wait + 1, wait_ms=wait)) for op, wait in waits.items()]


def test_waiting_beyond_the_least_is_waiting_for_others() -> None:
    waits = rank_waits([rank(all_reduce=5.0, all_gather=1.0), rank(all_reduce=2.0, all_gather=3.0)])
    assert [each.wait_ms for each in waits] == [6.0, 5.0]
    assert [each.least_ms for each in waits] == [3.0, 3.0]
    assert [each.for_others_ms for each in waits] == [3.0, 2.0]
    assert name_straggler(waits) == "rank 1 waits least: other ranks wait for it, up to 1.00 ms longer"
    assert [line.split() for line in format_waits(waits).splitlines()[2:4]] == [
        ["0", "6.00", "3.00"],
        ["1", "5.00", "2.00"],
    ]


def test_collectives_that_some_rank_is_no_part_of_are_not_compared() -> None:
    waits = rank_waits([rank(all_reduce=5.0, broadcast=9.0), rank(all_reduce=2.0)])
    assert [each.wait_ms for each in waits] == [5.0, 2.0]


def test_nobody_waits_in_an_empty_world() -> None:
    assert rank_waits([]) == []
    assert "none with a single rank" in format_waits(rank_waits([rank(all_reduce=1.0)]))
    assert name_straggler(rank_waits([rank(all_reduce=1.0)] * 2)) == "all ranks wait equally long"


def test_messages_survive_json() -> None:
    (message,) = rank(all_reduce=5.0)
    assert from_json(to_json(message)) == message
    with pytest.raises(KeyError):
        from_json({"op": "all_reduce"})


def test_without_a_log_the_summary_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert log_summary(return_dict=True) == {}
    assert "comms_logger.enabled is false" in capsys.readouterr().out
