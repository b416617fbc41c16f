"""What a batch really took: bars of all ranks on one clock, beside what the schedule promises.

    recorder = Recorder(runner.module)
    runner.train_batch(batches, 8, observe=recorder)
    measured = recorder.timeline()                       # on every rank
    Path("pipeline.svg").write_text(picture(predict_like(runner.schedule(8), measured), measured))

An action is measured from when it has what it works on; so a bar is work, and what lies between bars is the bubble:
waiting for other stages, and for messages.  Clocks of ranks are set by a barrier when a recorder is made, which is
exact on one host, and as exact as a barrier between hosts.
"""

from __future__ import annotations

import statistics
import time
from typing import final

import attrs

import zcomm

from .actions import Action, Kind
from .module import PipelineModule
from .schedule import Schedule
from .timeline import Bar, Timeline, predict

__all__ = ["Recorder", "picture", "predict_like"]


@final
@attrs.define(eq=False)
class Recorder:
    """Takes part in one batch as its `observe`.  Making one, and `timeline`, are collectives of the pipeline."""

    module: PipelineModule
    zero_s: float = attrs.field(init=False)  # time.perf_counter at the barrier
    bars: list[Bar] = attrs.field(factory=list)  # of this rank, in seconds after that

    @zero_s.default
    def _begin(self) -> float:
        cell = self.module.stage_cell()
        if cell.size > 1:
            zcomm.barrier(cell.group, label="recorder")
        return time.perf_counter()

    def __call__(self, action: Action, start: float, stop: float) -> None:
        """As `observe`."""
        self.bars.append(Bar(self.module.place.rank, action, start - self.zero_s, stop - self.zero_s))

    def timeline(self) -> Timeline:
        """The bars of all ranks, in seconds from the first one's begin."""
        cell = self.module.stage_cell()
        mine = [(str(bar.action), bar.start, bar.stop) for bar in self.bars]
        every = [mine] if cell.size == 1 else zcomm.exchange(mine, cell.group)
        bars = [Bar(rank, Action.parse(text), *times) for rank, told in enumerate(every) for text, *times in told]
        first = min((bar.start for bar in bars), default=0.0)
        moved = (attrs.evolve(bar, start=bar.start - first, stop=bar.stop - first) for bar in bars)
        return Timeline(self.module.place.num_ranks, tuple(moved))


def predict_like(schedule: Schedule, measured: Timeline) -> Timeline:
    """What `schedule` would take if each action took the median of its stage and kind, and messages no time."""
    times: dict[tuple[int, Kind], list[float]] = {}
    for bar in measured.bars:
        times.setdefault((bar.action.stage, bar.action.kind), []).append(bar.stop - bar.start)
    medians = {key: statistics.median(found) for key, found in times.items()}
    return predict(schedule, lambda action: medians.get((action.stage, action.kind), 0.0))


def picture(predicted: Timeline, measured: Timeline, width: int = 900) -> str:
    """Both as one SVG on one scale of time, each under a line that tells its bubble."""
    longest = max(predicted.span, measured.span)
    parts, top = [], 0
    for name, timeline in (("predicted", predicted), ("measured", measured)):
        told = f"{name}: {1e3 * timeline.span:.4g} ms, bubble {100 * timeline.bubble:.1f}% of the work"
        parts.append(f'<text x="4" y="{top + 14}" font-size="12" fill="currentColor">{told}</text>')
        rows = timeline.rows(width, longest, top + 20)
        parts += rows
        top += timeline.height() + 28
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" font-family="sans-serif">'
    return "".join([head, *parts, "</svg>"])
