"""TensorBoard events: one event a boundary with all its scalars, at x = samples seen.

Events are framed by tensorboard's own RecordWriter into a plain file, and flushed each time, so that a killed
run loses nothing. Rejected: torch's SummaryWriter, one event a scalar, several times the cost; and
tensorboard's EventFileWriter, whose thread reports a full disk one step late and prints a traceback of its
own.

The first boundary also writes a session start, which tells readers to forget points at or after it: a run
resumed from a checkpoint in the same folder continues its curves instead of drawing the lost steps twice. A
layout for the "Custom Scalars" page groups what belongs together; on the other pages the tag up to the first
"/" does.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any, final

from zengine.telemetry.snapshot import COMMUNICATION, MEMORY, THROUGHPUT, TIME, TRAIN, Snapshot
from zengine.telemetry.spans import MICRO, TIMERS

_FILE_NUMBER = itertools.count()  # two engines of one process may start in the same second

# page section -> chart title -> regular expressions of the tags drawn in it
LAYOUT = {
    "Training": {
        "loss": [f"{TRAIN}train_loss$"],
        "learning rate": [f"{TRAIN}lr(_group_[0-9]+)?$"],
        "gradient norm": [f"{TRAIN}grad_norm$"],
        "loss scale": [f"{TRAIN}loss_scale$"],
        "skipped steps": [f"{TRAIN}skipped_steps$"],
    },
    "Time": {
        "ms a step, by phase": [f"{TIME}{timer}$" for timer in TIMERS],
        "ms of the last micro-step, by phase": [f"{TIME}{timer}{MICRO}$" for timer in TIMERS],
        "samples a second": [f"{THROUGHPUT}samples_per_s$"],
        "ms a step": [f"{THROUGHPUT}step_ms$"],
    },
    "Memory": {
        "bytes": [f"{MEMORY}(process|cuda).*"],
        "bytes after each phase": [f"{MEMORY}after_.*"],
    },
    "Communication": {
        "bytes a step": [f"{COMMUNICATION}.*_bytes$"],
        "ms a step": [f"{COMMUNICATION}.*_ms$"],
    },
}


@final
class TensorBoardSink:
    """Writes one event file into `folder`."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event_of: Any = Event
        self._summary_of: Any = Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._records: Any = RecordWriter(open(folder / _file_name(), "xb"))  # noqa: SIM115 (closed by close)
        self._put(file_version="brain.Event:2")
        self._put(summary=Summary(value=[_layout_value()]))
        # Written before the first snapshot, then empty.
        self._session: list[Any] = [SessionLog(status=SessionLog.START)]
        self._records.flush()

    def write(self, snapshot: Snapshot) -> None:
        samples = snapshot.report.samples
        while self._session:
            self._put(step=samples, session_log=self._session.pop())
        values = [self._summary_of.Value(tag=tag, simple_value=value) for tag, value in snapshot.scalars().items()]
        self._put(step=samples, summary=self._summary_of(value=values))
        self._records.flush()

    def close(self) -> None:
        self._records.close()

    def _put(self, **fields: Any) -> None:
        self._records.write(self._event_of(wall_time=time.time(), **fields).SerializeToString())


def _file_name() -> str:
    """The pattern that TensorBoard looks for, unique on this host; sorts by time of creation."""
    origin = f"{socket.gethostname()}.{os.getpid()}.{next(_FILE_NUMBER)}"
    return f"events.out.tfevents.{int(time.time()):010d}.{origin}"


def _layout_value() -> Any:
    """The summary value that the custom scalars page reads its layout from."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.plugins.custom_scalar import layout_pb2

    def chart(title: str, tags: list[str]) -> Any:
        return layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=tags))

    categories = [
        layout_pb2.Category(title=section, chart=[chart(title, tags) for title, tags in charts.items()])
        for section, charts in LAYOUT.items()
    ]
    layout = layout_pb2.Layout(category=categories).SerializeToString()
    return Summary.Value(
        tag="custom_scalars__config__",
        tensor=TensorProto(dtype="DT_STRING", string_val=[layout]),
        metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="custom_scalars")),
    )
