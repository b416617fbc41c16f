"""TensorBoard sink: two events per boundary, DeepSpeed's tags at x = samples seen and ours at x = step.

Our own writer (records.py) frames events into a plain file and flushes each time, so a killed run loses nothing.
Rejected: torch's SummaryWriter, one event per scalar at several times the cost; and tensorboard's EventFileWriter,
whose thread reports a full disk one step late and prints a traceback of its own.

A run resumed in the same folder continues its curves: TensorBoard drops the points of a tag at or after a newer one.
For programs that use its EventAccumulator, the first event of samples carries a session start: the accumulator then
drops the lost steps of DeepSpeed's tags, and shows those of ours twice.  A layout for the "Custom Scalars" page
groups related tags; on the other pages the tag up to the first "/" does.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, final

from zengine.telemetry.sinks.base import Events, Sink
from zengine.telemetry.sinks.records import RecordWriter
from zengine.telemetry.sinks.tensorboard_values import (
    end_value,
    histogram_value,
    hparams_values,
    layout_value,
    text_values,
)
from zengine.telemetry.snapshot import COMMUNICATION, GRADIENTS, MEMORY, PERF, SAMPLES, TIME, TRAIN, Snapshot
from zengine.telemetry.spans import MICRO, TIMERS
from zengine.telemetry.subject import RunRecord

_FILE_NUMBER = itertools.count()  # two engines of one process may start in the same second

# page section -> chart title -> regular expressions of the tags drawn in it; one chart has one horizontal axis, and
# DeepSpeed's tags count samples where the others count steps
LAYOUT = {
    "Training": {
        "loss": [f"{TRAIN}loss$"],
        "gradient norm": [f"{TRAIN}grad_norm$"],
        "learning rate": [f"{TRAIN}learning_rate$"],
        "epoch": [f"{TRAIN}epoch$"],
        "loss scale, over samples": [f"{SAMPLES}loss_scale$"],
        "skipped steps, over samples": [f"{SAMPLES}skipped_steps$"],
    },
    "Speed": {
        "tokens a second": [f"{PERF}tokens_per_second$"],
        "samples a second": [f"{PERF}samples_per_second$"],
        "ms a step": [f"{PERF}step_time_ms$"],
        "TFLOPS of a device": [f"{PERF}tflops(_counted)?$"],
        "MFU": [f"{PERF}mfu$"],
    },
    "Phases": {
        "ms a step": [f"{TIME}{timer}$" for timer in TIMERS],
        "ms of the last micro-step": [f"{TIME}{timer}{MICRO}$" for timer in TIMERS],
    },
    "Memory": {
        "bytes by owner": [f"{MEMORY}(?!process|cuda|after_).*"],
        "bytes of process and allocator": [f"{MEMORY}(process|cuda).*"],
        "bytes after each phase": [f"{MEMORY}after_.*"],
    },
    "Communication": {
        "bytes a step": [f"{COMMUNICATION}.*_bytes$"],
        "ms a step": [f"{COMMUNICATION}.*_ms$"],
    },
    "Gradients": {
        "norm of each layer": [f"{GRADIENTS}.*"],
    },
    "DeepSpeed's tags, and the step": {
        "loss, over samples": [f"{SAMPLES}train_loss$"],
        "gradient norm, over samples": [f"{SAMPLES}grad_norm$"],
        "learning rate of each group, over samples": [f"{SAMPLES}lr(_group_[0-9]+)?$"],
        "step": [f"{TRAIN}global_step$"],
    },
}


@final
class TensorBoardSink(Sink):
    """Writes one event file into `folder`.

    left_out: sections and charts of the layout that stay empty in this run.
    """

    def __init__(self, folder: Path, left_out: Collection[str] = ()) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._event_of: Any = Event
        self._summary_of: Any = Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._records = RecordWriter(open(folder / _file_name(), "xb"))  # noqa: SIM115 (closed by close)
        self._events: dict[tuple[str, ...], Any] = {}  # by tags; a run has a handful of sets of tags
        self._put(file_version="brain.Event:2")
        self._put(summary=Summary(value=[layout_value(_without(left_out))]))
        # Written before the first snapshot, then empty.
        self._session: list[Any] = [SessionLog(status=SessionLog.START)]
        self._records.flush()

    def begin(self, record: RunRecord) -> None:
        self._put(summary=self._summary_of(value=[*hparams_values(record), *text_values(record)]))
        self._records.flush()

    def write(self, snapshot: Snapshot) -> None:
        report = snapshot.report
        while self._session:
            self._put(step=report.samples, session_log=self._session.pop())
        scalars = snapshot.scalars()
        theirs = {tag: value for tag, value in scalars.items() if tag.startswith(SAMPLES)}
        self._put_scalars(report.samples, theirs)
        self._put_scalars(report.step, {tag: value for tag, value in scalars.items() if tag not in theirs})
        if snapshot.layer_norms:
            histogram = histogram_value(f"{GRADIENTS}norm_by_layer", list(snapshot.layer_norms.values()))
            self._put(step=report.step, summary=self._summary_of(value=[histogram]))
        self._records.flush()

    def write_events(self, events: Events) -> None:
        for tag, value, x in events:
            one = self._summary_of.Value(tag=tag, simple_value=float(value))
            self._put(step=x, summary=self._summary_of(value=[one]))
        self._records.flush()

    def close(self) -> None:
        self._put(summary=self._summary_of(value=[end_value(time.time())]))
        self._records.close()

    def _put_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write one event; the event with the same tags is reused, which is faster than creating one."""
        tags = tuple(scalars)
        if tags not in self._events:
            values = [self._summary_of.Value(tag=tag) for tag in tags]
            self._events[tags] = self._event_of(summary=self._summary_of(value=values))
        event = self._events[tags]
        event.step, event.wall_time = step, time.time()
        for place, value in zip(event.summary.value, scalars.values()):
            place.simple_value = value
        self._records.write(event.SerializeToString())

    def _put(self, **fields: Any) -> None:
        self._records.write(self._event_of(wall_time=time.time(), **fields).SerializeToString())


def _without(left_out: Collection[str]) -> dict[str, dict[str, list[str]]]:
    sections = {name: charts for name, charts in LAYOUT.items() if name not in left_out}
    return {
        name: {title: tags for title, tags in charts.items() if title not in left_out}
        for name, charts in sections.items()
    }


def _file_name() -> str:
    """Return a name that TensorBoard finds, unique on this host and sorted by creation time."""
    origin = f"{socket.gethostname()}.{os.getpid()}.{next(_FILE_NUMBER)}"
    return f"events.out.tfevents.{int(time.time()):010d}.{origin}"
