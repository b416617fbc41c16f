"""Reports as JSON."""

from __future__ import annotations

import torch
import torch.distributed as dist

from zcomm.hangs.fingerprint import Call, CallState, Ring, short_path
from zcomm.hangs.report import Answer, CallSummary, GroupReport, Report, ranges


def ring_of(count: int) -> Ring:
    ring = Ring("7", (0, 2), title="the group of ranks 0, 2")
    for number in range(count):
        ring.add(Call.of("all_reduce", f"bucket[{number}]", 2, torch.zeros(2, 3)), dist.ReduceOp.MAX)
    return ring


def test_a_report_survives_the_journey() -> None:
    groups = (GroupReport.of(ring_of(3)),)
    report = Report(rank=2, world_size=4, context="step 3", stack=("a.py:1 in f",), groups=groups, note="n")
    assert Report.from_json(report.to_json()) == report
    left = Report(rank=0, world_size=1, answer=Answer.LEFT)
    assert Report.from_json(left.to_json().encode()) == left


def test_a_summary_has_the_arguments() -> None:
    found = CallSummary.of(ring_of(1).entries()[0])
    assert str(found) == "all_reduce max 'bucket[0]' of float32[6]"
    assert found.arguments == ("all_reduce", "max", "float32[6]")
    assert found.origin.startswith(f" (issued at {short_path(__file__)}:")
    barrier = Ring("", ()).add(Call("barrier", "", 2), None)
    assert str(CallSummary.of(barrier)) == "barrier"


def test_ranks_in_words() -> None:
    assert [ranges(ranks) for ranks in ([3], [0, 1], [0, 1, 2, 3, 7], [5, 0, 2])] == [
        "3",
        "0, 1",
        "0-3, 7",
        "0, 2, 5",
    ]


def test_only_recent_entries_travel_and_the_count_is_of_all() -> None:
    found = GroupReport.of(ring_of(100))
    assert (found.issued, len(found.entries), found.entries[-1].sequence) == (100, 64, 100)
    assert found.entry(100) is found.entries[-1]
    assert found.entry(1) is None


def test_a_rank_waits_for_the_first_that_is_not_done() -> None:
    ring = ring_of(3)
    for entry, state in zip(ring.entries(), (CallState.DONE, CallState.ISSUED, CallState.WAITING)):
        entry.state = state
    waiting = GroupReport.of(ring).waiting
    assert waiting is not None
    assert waiting.label == "bucket[2]"
