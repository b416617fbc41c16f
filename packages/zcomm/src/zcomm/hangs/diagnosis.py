"""Diagnosis: finds the rank that differs, from reports of all ranks, and describes it as text.

A pure function, because the cases are many and processes are slow.  Findings, in the order of their certainty:

1. ranks whose process has ended, or that have left the world;
2. per group with a waiting rank: the first position in the order of issue at which the ranks called different
   collectives, and whether one of them skipped a collective or issued one more;
3. ranks that have issued fewer collectives than others wait for, and their position, which may be in another group:
   that group's own lines explain it;
4. ranks that do not answer;
5. positions where only labels differ: a hint, because a program may label by rank.

Rejected: one cause instead of all findings.  A rank that died also issued fewer collectives, and a swap also ends in
a wait; with both findings the reader sees the cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from zcomm.hangs.report import Answer, CallSummary, GroupReport, Report, ranges

__all__ = ["diagnose"]

_ENDED = (
    "Its own output has the reason; without one it was killed (SIGKILL), by a user or, if memory was short, by the "
    "system (`dmesg`, or oom_kill in the memory.events of its control group)."
)

_Members = dict[int, GroupReport]  # reports of one group, by global rank


def diagnose(reports: Mapping[int, Report]) -> str:
    """Describe a failed collective, one finding per line.

    reports: by global rank, one for every rank, including those that could not answer.
    """
    lines = [
        _describe_ended(report)
        for _, report in sorted(reports.items())
        if report.answer in (Answer.GONE, Answer.LEFT)
    ]
    names = {group.name: group for report in reports.values() for group in report.groups if group.waiting}
    for name in sorted(names):
        lines += _describe_group(names[name], _members(reports, name), reports)
    silent = [_describe_silent(report) for _, report in sorted(reports.items()) if report.answer is Answer.SILENT]
    lines += [*silent, "Some did not answer: look at the other ranks first."] if silent else []
    return "\n".join(lines) or "No rank waits for a collective."


def first_mismatch(members: Mapping[int, GroupReport], *, by_label: bool = False) -> dict[int, CallSummary]:
    """Return all ranks' entries at the first position where their arguments differ; empty if they never do.

    by_label: the first position where only the labels differ, instead.
    """
    for sequence in sorted({entry.sequence for group in members.values() for entry in group.entries}):
        found = {rank: group.entry(sequence) for rank, group in sorted(members.items())}
        present = {rank: entry for rank, entry in found.items() if entry is not None}
        calls = {entry.arguments for entry in present.values()}
        if len(calls) > 1:
            return {} if by_label else present
        if by_label and len({entry.label for entry in present.values()}) > 1:
            return present
    return {}


def _members(reports: Mapping[int, Report], name: str) -> _Members:
    found = {rank: report.group(name) for rank, report in sorted(reports.items())}
    return {rank: group for rank, group in found.items() if group is not None}


def _describe_group(group: GroupReport, members: _Members, reports: Mapping[int, Report]) -> list[str]:
    """Lines of one group with a waiting rank."""
    title, ranks = group.title, group.ranks
    waiting = {rank: group.waiting for rank, group in members.items()}
    mismatch = first_mismatch(members)
    differing = _describe_mismatch(mismatch, members)
    target = max(entry.sequence for entry in waiting.values() if entry)
    absent = [
        _describe_absent(reports[rank], members.get(rank), title)
        for rank in ranks
        if rank in reports and reports[rank].answer is Answer.REPORTED and not waiting.get(rank)
        if rank not in members or members[rank].issued < target
    ]
    other_waits = {rank: entry for rank, entry in waiting.items() if entry and entry != mismatch.get(rank)}
    lines = [*differing, *absent, *_describe_waits(other_waits, title)]
    if not differing and not absent and all(waiting.get(rank) for rank in ranks):
        lines.append(_describe_agreement(waiting, title))
    return lines + _describe_labels(first_mismatch(members, by_label=True), title)


def _describe_mismatch(present: Mapping[int, CallSummary], members: _Members) -> list[str]:
    """One line for each rank whose call differs from that of most ranks."""
    if not present:
        return []
    usual_call, _ = Counter(entry.arguments for entry in present.values()).most_common(1)[0]
    model_rank, usual = next((rank, entry) for rank, entry in present.items() if entry.arguments == usual_call)
    usual_ranks = [rank for rank, entry in present.items() if entry.arguments == usual_call]
    there = f"on rank{'s' if len(usual_ranks) > 1 else ''} {ranges(usual_ranks)}"
    return [
        f"Rank {rank}'s collective {entry.sequence} is {entry}{entry.origin}; {there} it is {usual}{usual.origin}."
        + _describe_shift(entry, usual, members[rank], members[model_rank])
        for rank, entry in present.items()
        if entry.arguments != usual_call
    ]


def _describe_shift(entry: CallSummary, usual: CallSummary, odd: GroupReport, model: GroupReport) -> str:
    """Describe the shift of a rank that skipped a collective or issued one more, if its next call shows it."""
    after, usual_after = odd.entry(entry.sequence + 1), model.entry(entry.sequence + 1)
    if usual_after and _same(usual_after, entry) and not (after and _same(after, usual)):
        return " It seems to have skipped one."
    if after and _same(after, usual) and not (usual_after and _same(usual_after, entry)):
        return " It seems to have issued one more."
    return " The two are in another order there." if after and usual_after else ""


def _same(one: CallSummary, other: CallSummary) -> bool:
    return (one.arguments, one.label) == (other.arguments, other.label)


def _describe_absent(report: Report, group: GroupReport | None, title: str) -> str:
    """Line of a rank that has not reached the collective that others wait for."""
    issued = group.issued if group else 0
    others = [other for other in report.groups if other.waiting and other is not group]
    elsewhere = [f"waits for {other.waiting} of {other.title}" for other in others]
    at = f"; it is at {report.position}" if report.position else ""
    doing = elsewhere[0] if elsewhere else f"is not waiting for any{at}"
    return f"Rank {report.rank} has issued {_count(issued)} of {title}, and {doing}."


def _describe_waits(waiting: Mapping[int, CallSummary], title: str) -> list[str]:
    """Lines of waiting ranks; ranks that wait for the same, at the same source line, share a line."""
    alike: dict[str, list[int]] = {}
    for rank, entry in waiting.items():
        alike.setdefault(f"collective {entry.sequence} of {title}: {entry}{entry.origin}", []).append(rank)
    return [f"{_ranks(ranks)} for {what}." for what, ranks in alike.items()]


def _describe_agreement(waiting: Mapping[int, CallSummary | None], title: str) -> str:
    if len({entry.sequence for entry in waiting.values() if entry}) > 1:
        return f"The ranks of {title} wait at different points of the same sequence: a rank came late, or left early."
    return (
        f"All ranks of {title} wait for the same collective, with equal arguments: the connection between them "
        "failed, or the time limit is shorter than the work."
    )


def _describe_labels(present: Mapping[int, CallSummary], title: str) -> list[str]:
    if not present:
        return []
    labels = "; ".join(f"rank {rank} {entry.label!r}" for rank, entry in present.items())
    sequence = next(iter(present.values())).sequence
    return [f"The labels of collective {sequence} of {title} differ ({labels}): did a rank skip or swap one?"]


def _describe_ended(report: Report) -> str:
    note = f" ({report.note})" if report.note else ""
    if report.answer is Answer.GONE:
        return f"Rank {report.rank} is gone: its process has ended{note}. {_ENDED}"
    counts = [f"{_count(group.issued)} of {group.title}" for group in report.groups]
    return f"Rank {report.rank} has left the world after {' and '.join(counts) or 'no collective'}{note}."


def _describe_silent(report: Report) -> str:
    note = f" ({report.note})" if report.note else ""
    return f"Rank {report.rank} does not answer{note}: it died, is stopped, or is in code that holds the GIL."


def _count(issued: int) -> str:
    return f"{issued} collective{'' if issued == 1 else 's'}"


def _ranks(ranks: list[int]) -> str:
    return f"Rank {ranks[0]} waits" if len(ranks) == 1 else f"Ranks {ranges(ranks)} wait"
