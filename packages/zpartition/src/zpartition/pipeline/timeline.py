"""Timelines: when each action of a schedule happens for given durations, with bubble, memory, and a picture.

Durations are assumed (a backward takes two forwards) or measured in a run.  The picture shows ranks over time, as
text for a terminal or as SVG.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from zpartition.pipeline.actions import Action, ActionKind
from zpartition.pipeline.schedule import Schedule

COSTS: Mapping[ActionKind, float] = {
    ActionKind.FORWARD: 1.0,
    ActionKind.BACKWARD: 2.0,
    ActionKind.INPUT: 1.0,
    ActionKind.WEIGHT: 1.0,
}

_ROW = 26  # height of a rank's row

_COLOURS = {
    ActionKind.FORWARD: "#7eb6ff",
    ActionKind.BACKWARD: "#5fbf77",
    ActionKind.INPUT: "#5fbf77",
    ActionKind.WEIGHT: "#b8d8a0",
}


@attrs.frozen
class Bar:
    """One action in time."""

    rank: int
    action: Action
    start: float
    stop: float


@attrs.frozen
class Timeline:
    """Bars of a batch, in any unit of time; the batch starts at 0."""

    num_ranks: int
    bars: tuple[Bar, ...]

    @property
    def span(self) -> float:
        """Time from the first forward to the end of the last rank."""
        return max((bar.stop for bar in self.bars), default=0.0)

    def busy(self, rank: int) -> float:
        """Time in which a rank works."""
        return sum(bar.stop - bar.start for bar in self.bars if bar.rank == rank)

    @property
    def bubble(self) -> float:
        """Idle time of all ranks over their working time; (P-1)/M for 1F1B."""
        busy = sum(self.busy(rank) for rank in range(self.num_ranks))
        return self.num_ranks * self.span / busy - 1 if busy else 0.0

    def peak_kept(self, rank: int) -> int:
        """Maximum number of (stage, micro-batch) pairs whose activations the rank keeps at once."""
        kept, peak = 0, 0
        for bar in sorted((bar for bar in self.bars if bar.rank == rank), key=lambda bar: bar.start):
            kept += (bar.action.kind is ActionKind.FORWARD) - bar.action.kind.frees_activations
            peak = max(peak, kept)
        return peak

    def text(self, unit: float = 1.0) -> str:
        """Format one line per rank, with a cell for each `unit` of time that holds the running action."""
        width = max((len(_label(bar.action)) for bar in self.bars), default=1)
        count = round(self.span / unit)
        lines = []
        for rank in range(self.num_ranks):
            cells = ["."] * count
            for bar in self.bars:
                if bar.rank == rank:
                    for cell in range(round(bar.start / unit), round(bar.stop / unit)):
                        cells[cell] = _label(bar.action)
            lines.append(f"rank {rank}  " + " ".join(cell.ljust(width) for cell in cells).rstrip())
        return "\n".join(lines)

    def svg(self, width: int = 900) -> str:
        """Draw a self-contained SVG; bars have tooltips."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {self.height()}" font-family="sans-serif">'
        )
        return "".join([head, *self.rows(width, self.span, 0), "</svg>"])

    def height(self) -> int:
        """Height of the SVG rows, in its units."""
        return self.num_ranks * _ROW + 8

    def rows(self, width: int, span: float, top: int) -> list[str]:
        """Draw one row per rank as SVG elements; `span` of time fills the width."""
        left, scale = 52, (width - 60) / (span or 1.0)
        parts = []
        for rank in range(self.num_ranks):
            middle = top + rank * _ROW + _ROW / 2 + 8
            parts.append(f'<text x="4" y="{middle:.0f}" font-size="11" fill="currentColor">rank {rank}</text>')
        for bar in self.bars:
            x, y, wide = left + bar.start * scale, top + bar.rank * _ROW + 4, max((bar.stop - bar.start) * scale, 0.5)
            label = _label(bar.action)
            parts.append(
                f'<g><title>{bar.action}: {bar.start:g} to {bar.stop:g}</title><rect x="{x:.1f}" y="{y}" '
                f'width="{wide:.1f}" height="{_ROW - 4}" fill="{_COLOURS[bar.action.kind]}" stroke="#fff"/>'
            )
            if wide > 7 * len(label):
                centre = x + wide / 2
                parts.append(
                    f'<text x="{centre:.1f}" y="{y + _ROW / 2 + 2:.0f}" font-size="10" fill="#123" '
                    f'text-anchor="middle">{label}</text>'
                )
            parts.append("</g>")
        return parts


def simulate(
    schedule: Schedule,
    cost: Callable[[Action], float] = lambda action: COSTS[action.kind],
    send: float = 0.0,
) -> Timeline:
    """Simulate a checked schedule; `cost` of an action and `send` between ranks in one unit of time."""
    ends: dict[Action, float] = {}
    free, position = [0.0] * len(schedule.ranks), [0] * len(schedule.ranks)
    bars: list[Bar] = []
    done: set[Action] = set()
    while len(bars) < sum(map(len, schedule.ranks)):
        for rank, actions in enumerate(schedule.ranks):
            while position[rank] < len(actions) and not schedule.missing(actions[position[rank]], done):
                action = actions[position[rank]]
                ready = [
                    ends[each] + send * (schedule.rank_of(each.stage) != rank)
                    for each in _waited_for(schedule, action, done)
                ]
                start = max([free[rank], *ready])
                ends[action] = free[rank] = start + cost(action)
                bars.append(Bar(rank, action, start, ends[action]))
                done.add(action)
                position[rank] += 1
    return Timeline(len(schedule.ranks), tuple(bars))


def _waited_for(schedule: Schedule, action: Action, done: set[Action]) -> list[Action]:
    """Return the actions that `action` waited for; a whole backward replaces its first half."""
    needs = schedule.needs(action)
    return [need if need in done else Action(need.stage, ActionKind.BACKWARD, need.micro) for need in needs]


def _label(action: Action) -> str:
    return f"{action.kind.value}{action.micro}"
