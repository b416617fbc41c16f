"""Schedules of the literature, for any number of ranks and micro-batches.

With P ranks, M micro-batches and V stages per rank, and a backward as long as two forwards, a batch takes M turns of
work plus the bubble, given here as a fraction of the work:

| schedule | bubble | micro-batches in flight |
|---|---|---|
| gpipe | (P-1)/M | M |
| 1f1b | (P-1)/M | P - rank |
| interleaved | (P-1)/(V M) | (P - rank - 1) 2 + (V-1) P + 1, each of 1/V of the layers |
| zero bubble | (P-1)/(3 M), if M is P at least and F, I and W take equally long | P |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from zpartition.pipeline.actions import Action, ActionKind
from zpartition.pipeline.schedule import Schedule, ScheduleError


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """Run all forwards, then all backwards."""
    _check_counts(ranks, micro_batches)
    micros = range(micro_batches)
    lists = [
        (
            *(Action(rank, ActionKind.FORWARD, m) for m in micros),
            *(Action(rank, ActionKind.BACKWARD, m) for m in micros),
        )
        for rank in range(ranks)
    ]
    return Schedule("gpipe", ranks, micro_batches, tuple(lists)).checked()


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """Run forwards until the first backward is due, then alternate; keeps P micro-batches in memory instead of M."""
    _check_counts(ranks, micro_batches)
    lists = []
    for rank in range(ranks):
        forwards = [Action(rank, ActionKind.FORWARD, m) for m in range(micro_batches)]
        backwards = [Action(rank, ActionKind.BACKWARD, m) for m in range(micro_batches)]
        lists.append(_alternating(forwards, backwards, warmup=min(ranks - rank - 1, micro_batches)))
    return Schedule("1f1b", ranks, micro_batches, tuple(lists)).checked()


def interleaved(ranks: int, micro_batches: int, stages_per_rank: int) -> Schedule:
    """Run 1F1B over several stages per rank; divides the bubble by their number and sends more."""
    _check_counts(ranks, micro_batches)
    if stages_per_rank < 1 or (micro_batches % ranks and stages_per_rank > 1):
        raise ScheduleError(
            f"an interleaved schedule takes micro-batches in groups of {ranks} (one for each rank): {micro_batches} "
            f"micro-batches with {stages_per_rank} stages a rank do not divide; choose a multiple of {ranks}"
        )
    if stages_per_rank == 1:
        return one_f_one_b(ranks, micro_batches)
    lists = []
    for rank in range(ranks):
        turns = range(micro_batches * stages_per_rank)

        def action(kind: ActionKind, turn: int, rank: int = rank) -> Action:
            chunk = turn // ranks % stages_per_rank
            chunk = chunk if kind is ActionKind.FORWARD else stages_per_rank - 1 - chunk
            micro = turn // (ranks * stages_per_rank) * ranks + turn % ranks
            return Action(chunk * ranks + rank, kind, micro)

        warmup = min((ranks - rank - 1) * 2 + (stages_per_rank - 1) * ranks, len(turns))
        forwards = [action(ActionKind.FORWARD, turn) for turn in turns]
        backwards = [action(ActionKind.BACKWARD, turn) for turn in turns]
        lists.append(_alternating(forwards, backwards, warmup))
    return Schedule("interleaved", ranks * stages_per_rank, micro_batches, tuple(lists)).checked()


def zero_bubble(ranks: int, micro_batches: int) -> Schedule:
    """ZB-H1: 1F1B with weight gradients delayed by `rank` micro-batches, so that they fill the bubble at the end."""
    _check_counts(ranks, micro_batches)
    lists = []
    for rank in range(ranks):
        ahead = min(ranks - rank, micro_batches)
        actions = [Action(rank, ActionKind.FORWARD, micro) for micro in range(ahead)]
        for micro in range(micro_batches):
            actions.append(Action(rank, ActionKind.INPUT, micro))
            if micro >= rank:
                actions.append(Action(rank, ActionKind.WEIGHT, micro - rank))
            if micro + ahead < micro_batches:
                actions.append(Action(rank, ActionKind.FORWARD, micro + ahead))
        late = range(max(micro_batches - rank, 0), micro_batches)
        lists.append((*actions, *(Action(rank, ActionKind.WEIGHT, micro) for micro in late)))
    return Schedule("zero bubble", ranks, micro_batches, tuple(lists)).checked()


def _alternating(forwards: list[Action], backwards: list[Action], warmup: int) -> tuple[Action, ...]:
    steady = len(forwards) - warmup
    pairs = [each for pair in zip(forwards[warmup:], backwards[:steady]) for each in pair]
    return (*forwards[:warmup], *pairs, *backwards[steady:])


def _check_counts(ranks: int, micro_batches: int) -> None:
    if ranks < 1 or micro_batches < 1:
        raise ScheduleError(f"a schedule needs at least one rank and micro-batch, got {ranks} and {micro_batches}")


SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zero_bubble": zero_bubble,
}


def make_schedule(name: str, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Schedule:
    """Make a schedule by name: gpipe, 1f1b, interleaved, zero_bubble.  Raises ScheduleError for others, or counts
    that do not fit.
    """
    if name == "interleaved":
        return interleaved(ranks, micro_batches, stages_per_rank)
    if name not in SCHEDULES:
        raise ScheduleError(
            f"unknown schedule {name!r}; choose one of {', '.join(sorted([*SCHEDULES, 'interleaved']))}"
        )
    if stages_per_rank != 1:
        raise ScheduleError(f'schedule {name!r} has one stage a rank, not {stages_per_rank}; use "interleaved"')
    return SCHEDULES[name](ranks, micro_batches)
