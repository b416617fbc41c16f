"""Measurement of a batch: the actions of all ranks on one clock, and a picture beside the schedule's prediction.

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
from typing import final

import attrs

import zcomm
from zpartition.pipeline.actions import Action, ActionKind
from zpartition.pipeline.module import PipelineModule
from zpartition.pipeline.schedule import Schedule
from zpartition.pipeline.timeline import Bar, Timeline, simulate

__all__ = ["Recorder", "comparison_svg", "simulate_measured"]


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
