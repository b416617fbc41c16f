"""Straggler analysis: communication waits of all ranks, compared.

All ranks enter the same collectives and leave each at about the same time; the latest rank waits least.  So for each
operation and size the least wait over the ranks is the communication itself, and any wait beyond it is a wait for
other ranks.  The rank with the least total wait is the straggler: the slowest to compute, or the one with most work.

Each rank writes its own record to the run's folder when it closes; no rank waits for another to end.  `log_summary`
compares during the run and is a collective.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

import zcomm
from zengine.telemetry.comms import CommsLog, Messages, Tally, columns, format_messages
from zengine.telemetry.json_values import read_amount, read_count, read_text

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["RankWait", "from_json", "log_summary", "open_log", "open_messages", "rank_waits", "to_json"]

_open: weakref.WeakSet[CommsLog] = weakref.WeakSet()  # logs that count now; all see the same, process-wide trace


@attrs.frozen(kw_only=True)
class RankWait:
    """Waits of one rank over all collectives, compared with the other ranks."""

    rank: int
    wait_ms: float  # total
    least_ms: float  # the same sum over the least wait of any rank per operation and size
    spread_ms: float = 0.0  # longest wait of any rank minus this rank's

    @property
    def for_others_ms(self) -> float:
        """Wait of this rank for other ranks."""
        return self.wait_ms - self.least_ms


def rank_waits(ranks: Sequence[Sequence[Messages]]) -> list[RankWait]:
    """Compute the waits by rank from the messages of all ranks, in rank order.

    Kinds of messages that some rank did not see (groups without it) are left out.
    """
    waits = [{each.key: each.tally.wait_ms for each in messages} for messages in ranks]
    common = set.intersection(*(set(rank) for rank in waits)) if waits else set()
    least = sum(min(rank[key] for rank in waits) for key in common)
    totals = [sum(rank[key] for key in common) for rank in waits]
    most = max(totals, default=0.0)
    return [
        RankWait(rank=rank, wait_ms=total, least_ms=least, spread_ms=most - total)
        for rank, total in enumerate(totals)
    ]


def format_waits(waits: Sequence[RankWait]) -> str:
    """Format a line per rank, and name the straggler."""
    if len(waits) < 2:
        return "stragglers: none with a single rank"
    rows = [("rank", "waited ms", "for others ms")]
    rows += [(str(each.rank), f"{each.wait_ms:.2f}", f"{each.for_others_ms:.2f}") for each in waits]
    return "\n".join(
        ["waits by rank (the least wait is the communication itself):", *columns(rows), name_straggler(waits)]
    )


def name_straggler(waits: Sequence[RankWait]) -> str:
    """Name the straggler in one sentence."""
    slowest = max(waits, key=lambda each: each.spread_ms)
    if slowest.spread_ms <= 0:
        return "all ranks wait equally long"
    return f"rank {slowest.rank} waits least: other ranks wait for it, up to {slowest.spread_ms:.2f} ms longer"


def open_log(log: CommsLog) -> CommsLog:
    """Register a log for `log_summary`, for as long as it lives."""
    _open.add(log)
    return log


def open_messages() -> list[Messages] | None:
    """Return the messages of the log that has counted most; None if there is no log."""
    return max((each.messages() for each in _open), key=lambda found: sum(m.tally.count for m in found), default=None)


def log_summary(
    show_straggler: bool = False, return_dict: bool = False, group: ProcessGroup | None = None
) -> dict[str, Any]:
    """Print the communication since the oldest engine with `comms_logger` was created.

    show_straggler: compare with the other ranks of `group` (None: all); every rank must call, and rank 0 prints the
    comparison.  return_dict: also return it as operation -> size -> figures, with "stragglers" by rank.
    """
    mine = open_messages()
    is_first = zcomm.group_rank(group) == 0
    if is_first:
        print("communication: not counted (comms_logger.enabled is false)" if mine is None else format_messages(mine))
    waits: list[RankWait] = []
    if show_straggler:
        everyone = zcomm.all_gather_object([to_json(each) for each in mine or ()], group)
        waits = rank_waits([[from_json(fields) for fields in rank] for rank in everyone])
        if is_first:
            print(format_waits(waits))
    return _as_dict(mine or [], waits) if return_dict else {}


def _as_dict(messages: Sequence[Messages], waits: Sequence[RankWait]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in messages:
        figures = {"count": each.tally.count, "total_ms": each.tally.ms, "wait_ms": each.tally.wait_ms}
        rates = {"algbw_gb_per_s": each.tally.gb_per_s, "busbw_gb_per_s": each.bus_gb_per_s}
        found.setdefault(each.op, {})[each.size_bytes] = {**figures, **rates}
    stragglers = {each.rank: {"wait_ms": each.wait_ms, "for_others_ms": each.for_others_ms} for each in waits}
    return {**found, "stragglers": stragglers} if waits else found


def to_json(each: Messages) -> dict[str, Any]:
    """Return a flat JSON object."""
    return {
        "op": each.op,
        "size_bytes": each.size_bytes,
        "group_size": each.group_size,
        **attrs.asdict(each.tally),
    }


def from_json(fields: dict[str, Any]) -> Messages:
    """Inverse of `to_json`.  Raises KeyError, TypeError or ValueError for other input."""
    tally = Tally(
        count=read_count(fields["count"]),
        nbytes=read_count(fields["nbytes"]),
        ms=read_amount(fields["ms"]),
        wait_ms=read_amount(fields["wait_ms"]),
    )
    return Messages(
        read_text(fields["op"]), read_count(fields["size_bytes"]), read_count(fields["group_size"]), tally
    )
