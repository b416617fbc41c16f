"""The diagnosis as a function of reports: no processes."""

from __future__ import annotations

import zcomm.hangs.diagnosis
from zcomm.hangs.diagnosis import diagnose, first_mismatch
from zcomm.hangs.fingerprint import CallState
from zcomm.hangs.report import Answer, CallSummary, GroupReport, Report

TITLE = "the default group"


def entry(
    sequence: int,
    op: str,
    label: str = "",
    state: CallState = CallState.DONE,
    *,
    numel: int = 4,
    site: str = "train.py:80",
) -> CallSummary:
    return CallSummary(sequence, op, label, "sum" if "reduce" in op else "", f"float32[{numel}]", "", site, state)


def group(*entries: CallSummary, size: int = 3, name: str = "0", title: str = TITLE) -> GroupReport:
    issued = entries[-1].sequence if entries else 0
    return GroupReport(name, title, tuple(range(size)), issued, entries)


def report_of(
    rank: int, *groups: GroupReport, size: int = 3, stack: tuple[str, ...] = (), context: str = ""
) -> Report:
    return Report(rank=rank, world_size=size, groups=groups, stack=stack, context=context)


def by_rank(*reports: Report) -> dict[int, Report]:
    return {report.rank: report for report in reports}


FIRST = entry(40, "all_reduce", "loss")
WAITING = entry(41, "reduce_scatter", "unit blocks.3", CallState.WAITING)


def test_a_rank_that_asks_for_another_collective_is_named_with_both() -> None:
    odd = entry(41, "all_gather", "unit blocks.4", CallState.FAILED, site="train.py:91")
    usual = group(FIRST, WAITING)
    text = diagnose(by_rank(report_of(0, usual), report_of(1, usual), report_of(2, group(FIRST, odd))))
    assert text.splitlines() == [
        "Rank 2's collective 41 is all_gather 'unit blocks.4' of float32[4] (issued at train.py:91); on ranks 0, 1 "
        "it is reduce_scatter sum 'unit blocks.3' of float32[4] (issued at train.py:80).",
    ]


def test_between_two_ranks_neither_is_the_usual_one() -> None:
    odd = entry(41, "reduce_scatter", "unit blocks.3", CallState.WAITING, numel=6)
    text = diagnose(by_rank(report_of(0, group(WAITING, size=2), size=2), report_of(1, group(odd, size=2), size=2)))
    assert "Rank 1's collective 41 is reduce_scatter sum 'unit blocks.3' of float32[6]" in text
    assert "; on rank 0 it is reduce_scatter sum 'unit blocks.3' of float32[4]" in text


def test_the_first_mismatch_counts_and_later_ones_do_not() -> None:
    usual = [entry(1, "all_reduce", "a"), entry(2, "all_reduce", "b"), entry(3, "barrier", "", CallState.WAITING)]
    odd = [entry(1, "all_reduce", "a"), entry(2, "broadcast", "x"), entry(3, "all_gather", "y", CallState.WAITING)]
    found = first_mismatch({0: group(*usual), 1: group(*odd), 2: group(*usual)})
    assert {rank: one.op for rank, one in found.items()} == {0: "all_reduce", 1: "broadcast", 2: "all_reduce"}


def test_a_skipped_one_an_extra_one_and_a_swap_are_distinguished() -> None:
    def issued(*ops: str) -> GroupReport:
        entries = [entry(at, op, f"the {op}") for at, op in enumerate(ops, start=1)]
        return group(*entries, entry(9, "barrier", "", CallState.WAITING))

    usual = issued("all_reduce", "broadcast", "all_gather")
    for ops, said in (
        (("broadcast", "all_gather"), "skipped one"),
        (("all_to_all", "all_reduce", "broadcast"), "issued one more"),
        (("broadcast", "all_reduce", "all_gather"), "in another order there"),
    ):
        text = diagnose(by_rank(report_of(0, usual), report_of(1, usual), report_of(2, issued(*ops))))
        assert text.splitlines()[0].startswith("Rank 2's collective 1 is "), text
        assert said in text.splitlines()[0], text


def test_a_rank_that_did_not_come_is_named_with_its_position() -> None:
    late = report_of(1, group(FIRST), stack=("data.py:12 in next_batch", "train.py:88 in main"), context="step 12")
    text = diagnose(by_rank(report_of(0, group(FIRST, WAITING)), late, report_of(2, group(FIRST, WAITING))))
    assert text.splitlines() == [
        "Rank 1 has issued 40 collectives of the default group, and is not waiting for any; it is at step 12, "
        "data.py:12 in next_batch < train.py:88 in main.",
        "Ranks 0, 2 wait for collective 41 of the default group: reduce_scatter sum 'unit blocks.3' of float32[4] "
        "(issued at train.py:80).",
    ]


def test_a_rank_without_any_collective_of_the_group_has_issued_none() -> None:
    text = diagnose(by_rank(report_of(0, group(WAITING)), report_of(1), report_of(2, group(WAITING))))
    assert text.startswith("Rank 1 has issued 0 collectives of the default group, and is not waiting for any.")


def test_a_rank_that_waits_in_another_group_leads_on_to_that_group() -> None:
    inner = "the group of ranks 1, 2"
    stuck = GroupReport("5", inner, (1, 2), 7, (entry(7, "barrier", "inner", CallState.WAITING),))
    busy = GroupReport("5", inner, (1, 2), 6, (entry(6, "barrier", "inner"),))
    reports = by_rank(
        report_of(0, group(FIRST, WAITING)),
        report_of(1, group(FIRST), stuck),
        report_of(2, group(FIRST), busy, stack=("data.py:3 in load",)),
    )
    text = diagnose(reports)
    assert (
        f"Rank 1 has issued 40 collectives of {TITLE}, and waits for barrier 'inner' of float32[4] of {inner}" in text
    )
    assert (
        f"Rank 2 has issued 6 collectives of {inner}, and is not waiting for any; it is at data.py:3 in load" in text
    )


def test_a_rank_that_finished_the_collective_is_not_blamed() -> None:
    sent = group(entry(41, "broadcast", "weights"))
    waits = group(entry(41, "broadcast", "weights", CallState.WAITING))
    text = diagnose(by_rank(report_of(0, sent), report_of(1, waits), report_of(2, waits)))
    assert text.splitlines() == [
        "Ranks 1, 2 wait for collective 41 of the default group: broadcast 'weights' of float32[4] "
        "(issued at train.py:80)."
    ]


def test_ranks_that_agree_blame_the_connection() -> None:
    text = diagnose(by_rank(*(report_of(rank, group(FIRST, WAITING)) for rank in range(3))))
    assert text.splitlines()[-1] == (
        "All ranks of the default group wait for the same collective, with equal arguments: the connection between "
        "them failed, or the time limit is shorter than the work."
    )


def test_ends_come_first_and_silence_last() -> None:
    gone = Report(rank=1, world_size=4, answer=Answer.GONE, note="process 4711 of this host")
    left = Report(rank=2, world_size=4, answer=Answer.LEFT, groups=(group(entry(1, "barrier"), size=4),))
    silent = Report(rank=3, world_size=4, answer=Answer.SILENT, note="it has issued no collective")
    lines = diagnose(by_rank(report_of(0, group(FIRST, WAITING, size=4), size=4), gone, left, silent)).splitlines()
    assert lines[0].startswith(
        "Rank 1 is gone: its process has ended (process 4711 of this host). Its own output has "
    )
    assert "if memory was short, by the system (`dmesg`, or oom_kill in the memory.events" in lines[0]
    assert lines[1] == "Rank 2 has left the world after 1 collective of the default group."
    assert lines[-2].startswith("Rank 3 does not answer (it has issued no collective): it died, is stopped, or ")
    assert lines[-1] == "Some did not answer: look at the other ranks first."
    assert not any("has issued 0 collectives" in line for line in lines)


def test_labels_that_differ_are_a_hint_and_no_accusation() -> None:
    reports = by_rank(
        *(report_of(rank, group(entry(40, "all_reduce", f"of {rank % 2}"), WAITING)) for rank in range(3))
    )
    lines = diagnose(reports).splitlines()
    assert lines[-1] == (
        "The labels of collective 40 of the default group differ (rank 0 'of 0'; rank 1 'of 1'; rank 2 'of 0'): "
        "did a rank skip or swap one?"
    )
    assert not any("'s collective" in line for line in lines)


def test_without_a_waiting_rank_there_is_no_finding() -> None:
    assert zcomm.hangs.diagnosis.diagnose(by_rank(report_of(0, group(FIRST)))) == "No rank waits for a collective."
