"""Timelines: when each action of a schedule runs, simulated or measured, with bubble, memory, and a picture.

`simulate` takes durations, by default a backward as long as two forwards.  A `Recorder` measures one batch on all
ranks, and `comparison_svg` draws it beside the prediction:

    recorder = Recorder(runner.module)
    runner.train_batch(batches, 8, observe=recorder)
    measured = recorder.timeline()                       # on every rank
    Path("pipeline.svg").write_text(comparison_svg(simulate_measured(runner.schedule(8), measured), measured))

An action is measured from the moment its inputs are available; so bars are work, and the gaps between them are the
bubble: waits for other stages and for messages.  The clocks of the ranks are aligned by a barrier when a recorder is
created, which is exact on one host, and as exact as a barrier between hosts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import final

import attrs

import zcomm
from zpartition.pipeline.module import PipelineModule
from zpartition.pipeline.schedule import Action, ActionKind, Schedule

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
                    for each in _finished_needs(schedule, action, done)
                ]
                start = max([free[rank], *ready])
                ends[action] = free[rank] = start + cost(action)
                bars.append(Bar(rank, action, start, ends[action]))
                done.add(action)
                position[rank] += 1
    return Timeline(len(schedule.ranks), tuple(bars))


@final
@attrs.define(eq=False)
class Recorder:
    """Records one batch, passed as `observe`.  Its creation and `timeline` are collectives of the pipeline."""

    module: PipelineModule
    zero_s: float = attrs.field(init=False)  # time.perf_counter at the barrier
    bars: list[Bar] = attrs.field(factory=list)  # of this rank, in seconds after that

    @zero_s.default
    def _begin(self) -> float:
        mp_group = self.module.stage_group()
        if mp_group.size > 1:
            zcomm.barrier(mp_group.group, label="recorder")
        return time.perf_counter()

    def __call__(self, action: Action, start: float, stop: float) -> None:
        """Record an action."""
        self.bars.append(Bar(self.module.pipeline_position.rank, action, start - self.zero_s, stop - self.zero_s))

    def timeline(self) -> Timeline:
        """Return the bars of all ranks, in seconds from the start of the first one."""
        mp_group = self.module.stage_group()
        mine = [(str(bar.action), bar.start, bar.stop) for bar in self.bars]
        every = [mine] if mp_group.size == 1 else zcomm.all_gather_object(mine, mp_group.group)
        bars = [Bar(rank, Action.parse(text), *times) for rank, rows in enumerate(every) for text, *times in rows]
        first = min((bar.start for bar in bars), default=0.0)
        moved = (attrs.evolve(bar, start=bar.start - first, stop=bar.stop - first) for bar in bars)
        return Timeline(self.module.pipeline_position.num_ranks, tuple(moved))


def simulate_measured(schedule: Schedule, measured: Timeline) -> Timeline:
    """Simulate `schedule` with the median time of each stage and kind in `measured`, and free messages."""
    times: dict[tuple[int, ActionKind], list[float]] = {}
    for bar in measured.bars:
        times.setdefault((bar.action.stage, bar.action.kind), []).append(bar.stop - bar.start)
    medians = {key: statistics.median(found) for key, found in times.items()}
    return simulate(schedule, lambda action: medians.get((action.stage, action.kind), 0.0))


def comparison_svg(predicted: Timeline, measured: Timeline, width: int = 900) -> str:
    """Draw both timelines as one SVG on one time scale, each under a line with its bubble."""
    longest = max(predicted.span, measured.span)
    parts, top = [], 0
    for name, timeline in (("predicted", predicted), ("measured", measured)):
        title = f"{name}: {1e3 * timeline.span:.4g} ms, bubble {100 * timeline.bubble:.1f}% of the work"
        parts.append(f'<text x="4" y="{top + 14}" font-size="12" fill="currentColor">{title}</text>')
        rows = timeline.rows(width, longest, top + 20)
        parts += rows
        top += timeline.height() + 28
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" font-family="sans-serif">'
    return "".join([head, *parts, "</svg>"])


def _finished_needs(schedule: Schedule, action: Action, done: set[Action]) -> list[Action]:
    """Return the actions that `action` waited for; a whole backward replaces its first half."""
    needs = schedule.needs(action)
    return [need if need in done else Action(need.stage, ActionKind.BACKWARD, need.micro) for need in needs]


def _label(action: Action) -> str:
    return f"{action.kind.value}{action.micro}"
