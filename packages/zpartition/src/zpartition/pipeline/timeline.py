"""When each action of a schedule happens, if actions take so long: the bubble, the memory, and a picture.

Times come from a guess (a backward is two forwards), or from a measurement of a run.  The picture is ranks x time, as
text for a terminal or as SVG for a page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from .actions import Action, Kind
from .schedule import Schedule

COSTS: Mapping[Kind, float] = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}

_ROW = 26  # height of a rank's row

_COLOURS = {Kind.FORWARD: "#7eb6ff", Kind.BACKWARD: "#5fbf77", Kind.INPUT: "#5fbf77", Kind.WEIGHT: "#b8d8a0"}


@attrs.frozen
class Bar:
    """One action in time."""

    rank: int
    action: Action
    start: float
    stop: float


@attrs.frozen
class Timeline:
    """Bars of a batch, in any unit of time; the batch begins at 0."""

    num_ranks: int
    bars: tuple[Bar, ...]

    @property
    def span(self) -> float:
        """From the first forward to the end of the last rank."""
        return max((bar.stop for bar in self.bars), default=0.0)

    def busy(self, rank: int) -> float:
        """Time in which this rank works."""
        return sum(bar.stop - bar.start for bar in self.bars if bar.rank == rank)

    @property
    def bubble(self) -> float:
        """Time in which ranks wait, over the time in which they work; (P-1)/M for 1F1B."""
        busy = sum(self.busy(rank) for rank in range(self.num_ranks))
        return self.num_ranks * self.span / busy - 1 if busy else 0.0

    def peak_kept(self, rank: int) -> int:
        """Most (stage, micro-batch) pairs whose activations the rank keeps at once."""
        kept, peak = 0, 0
        for bar in sorted((bar for bar in self.bars if bar.rank == rank), key=lambda bar: bar.start):
            kept += (bar.action.kind is Kind.FORWARD) - bar.action.kind.frees_activations
            peak = max(peak, kept)
        return peak

    def text(self, unit: float = 1.0) -> str:
        """A line a rank: every `unit` of time one cell with the action that runs then."""
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
        """A self-contained picture; bars have titles that show on hover."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {self.height()}" font-family="sans-serif">'
        )
        return "".join([head, *self.rows(width, self.span, 0), "</svg>"])

    def height(self) -> int:
        """Of the rows of an SVG, in its units."""
        return self.num_ranks * _ROW + 8

    def rows(self, width: int, span: float, top: int) -> list[str]:
        """A row a rank, as elements of an SVG; `span` of time is as wide as there is room."""
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


def predict(
    schedule: Schedule,
    cost: Callable[[Action], float] = lambda action: COSTS[action.kind],
    send: float = 0.0,
) -> Timeline:
    """The timeline of a checked schedule; `cost` and `send` (from one rank to another) in one unit of time."""
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
                    for each in _causes(schedule, action, done)
                ]
                start = max([free[rank], *ready])
                ends[action] = free[rank] = start + cost(action)
                bars.append(Bar(rank, action, start, ends[action]))
                done.add(action)
                position[rank] += 1
    return Timeline(len(schedule.ranks), tuple(bars))


def _causes(schedule: Schedule, action: Action, done: set[Action]) -> list[Action]:
    """What `action` waited for, as it happened: a whole backward stands for its first half."""
    needs = schedule.needs(action)
    return [need if need in done else Action(need.stage, Kind.BACKWARD, need.micro) for need in needs]


def _label(action: Action) -> str:
    return f"{action.kind.value}{action.micro}"
