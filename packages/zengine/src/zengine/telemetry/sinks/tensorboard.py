"""TensorBoard sink: two events per boundary, DeepSpeed's tags at x = samples seen and ours at x = step.

Our own writer (records.py) frames events into a plain file and flushes each time, so a killed run loses nothing.
Rejected: torch's SummaryWriter, one event per scalar at several times the cost; and tensorboard's EventFileWriter,
whose thread reports a full disk one step late and prints a traceback of its own.

A run resumed in the same folder continues its curves: TensorBoard drops the points of a tag at or after a newer one.
For programs that use its EventAccumulator, the first event of samples carries a session start: the accumulator then
drops the lost steps of DeepSpeed's tags, and shows those of ours twice.  A layout for the "Custom Scalars" page
groups related tags; on the other pages the tag up to the first "/" does.  Those pages sort groups by character, so
ours begin with a digit (`GROUPS`): the page opens on loss, speed and time, each once, and DeepSpeed's tags, whose
names cannot change, are the group "Train" below them.

Packages of TensorBoard's plugins are imported when a value is made, so only runs that write events pay for them.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np

from zengine.telemetry.sinks.base import Events, Sink
from zengine.telemetry.sinks.records import RecordWriter
from zengine.telemetry.snapshot import COMMUNICATION, GRADIENTS, MEMORY, PERF, SAMPLES, TIME, TRAIN, Snapshot
from zengine.telemetry.spans import MICRO, TIMERS
from zengine.telemetry.subject import RunRecord

_FILE_NUMBER = itertools.count()  # two engines of one process may start in the same second

# Beginning of a tag -> that of its name here, in the order of the page; the first that fits counts.
GROUPS = {
    f"{TRAIN}loss": "1 loss/loss",
    PERF: "2 speed/",
    TIME: "3 time/ms_",  # over steps; DeepSpeed's tags have the same over samples
    TRAIN: "4 training/",
    MEMORY: "5 memory/",
    COMMUNICATION: "6 communication/",
    GRADIENTS: "7 gradients/",
}


def shown(tag: str) -> str:
    """Return the name that TensorBoard shows of a tag: "train/loss" -> "1 loss/loss"."""
    for begin, group in GROUPS.items():
        if tag.startswith(begin):
            return group + tag.removeprefix(begin)
    return tag


def tag_of(name: str) -> str:
    """Return the tag that TensorBoard shows under a name; "" for a curve that DeepSpeed's tags have, too."""
    for begin, group in GROUPS.items():
        if name.startswith(group):
            return "" if begin == TIME else begin + name.removeprefix(group)
    return name


# Tags whose last value the hparams page shows of a run.
METRICS = tuple(
    shown(f"{family}{name}")
    for family, name in (
        (TRAIN, "loss"),
        (PERF, "tokens_per_second"),
        (PERF, "samples_per_second"),
        (PERF, "tflops"),
        (PERF, "mfu"),
    )
)

# page section -> chart title -> regular expressions of the tags drawn in it; one chart has one horizontal axis, and
# DeepSpeed's tags count samples where the others count steps
LAYOUT = {
    "Training": {
        "loss": ["1 loss/loss$"],
        "gradient norm": ["4 training/grad_norm$"],
        "learning rate": ["4 training/learning_rate$"],
        "epoch": ["4 training/epoch$"],
        "loss scale, over samples": [f"{SAMPLES}loss_scale$"],
        "skipped steps, over samples": [f"{SAMPLES}skipped_steps$"],
    },
    "Speed": {
        "tokens a second": ["2 speed/tokens_per_second$"],
        "samples a second": ["2 speed/samples_per_second$"],
        "ms a step": ["2 speed/step_time_ms$"],
        "TFLOPS of a device": ["2 speed/tflops(_counted)?$"],
        "MFU": ["2 speed/mfu$"],
    },
    "Phases": {
        "ms a step": [f"3 time/ms_{timer}$" for timer in TIMERS],
        "ms of the last micro-step": [f"{TIME}{timer}{MICRO}$" for timer in TIMERS],
    },
    "Memory": {
        "bytes by owner": ["5 memory/(?!process|cuda|after_).*"],
        "bytes of process and allocator": ["5 memory/(process|cuda).*"],
        "bytes after each phase": ["5 memory/after_.*"],
    },
    "Communication": {
        "bytes a step": ["6 communication/.*_bytes$"],
        "ms a step": ["6 communication/.*_ms$"],
    },
    "Gradients": {
        "norm of each layer": ["7 gradients/.*"],
    },
    "DeepSpeed's tags, and the step": {
        "loss, over samples": [f"{SAMPLES}train_loss$"],
        "gradient norm, over samples": [f"{SAMPLES}grad_norm$"],
        "learning rate of each group, over samples": [f"{SAMPLES}lr(_group_[0-9]+)?$"],
        "ms a step, over samples": [f"{TIME}{timer}$" for timer in TIMERS],
        "step": ["4 training/global_step$"],
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
        times = {tag: ms for tag, ms in theirs.items() if tag.startswith(TIME) and not tag.endswith(MICRO)}
        ours = {tag: value for tag, value in scalars.items() if tag not in theirs}
        self._put_scalars(report.samples, theirs, str)
        self._put_scalars(report.step, {**ours, **times}, shown)
        if snapshot.layer_norms:
            tag = shown(f"{GRADIENTS}norm_by_layer")
            histogram = histogram_value(tag, list(snapshot.layer_norms.values()))
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

    def _put_scalars(self, step: int, scalars: Mapping[str, float], name: Callable[[str], str]) -> None:
        """Write one event; the event with the same tags is reused, which is faster than creating one."""
        tags = tuple(scalars)
        if tags not in self._events:
            values = [self._summary_of.Value(tag=name(tag)) for tag in tags]
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


def layout_value(layout: Mapping[str, Mapping[str, list[str]]]) -> Any:
    """Return the custom scalars layout: section -> chart -> regular expressions of its tags."""
    from tensorboard.plugins.custom_scalar import layout_pb2

    def chart(title: str, tags: list[str]) -> Any:
        return layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=tags))

    categories = [
        layout_pb2.Category(title=section, chart=[chart(title, tags) for title, tags in charts.items()])
        for section, charts in layout.items()
    ]
    text = layout_pb2.Layout(category=categories).SerializeToString()
    return _of_text("custom_scalars__config__", "custom_scalars", text)


def text_values(record: RunRecord) -> list[Any]:
    """Return the text page: the given config, the plan with origins, and the environment."""
    config = json.dumps(dict(record.config), indent=2)
    pages = {
        "run/config": "\n".join(f"    {line}" for line in config.splitlines()),
        "run/plan": _table(("key", "value", "from"), record.plan),
        "run/environment": _table(("environment", "value"), list(record.environment.items())),
    }
    return [_of_text(tag, "text", page.encode()) for tag, page in pages.items()]


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "/") for cell in line) + " |" for line in lines)


def hparams_values(record: RunRecord) -> list[Any]:
    """Return the hparams page at the start of a run: the comparable values and those of this run."""
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    start = plugin_data_pb2.SessionStartInfo()
    infos = []
    for name, value in record.hparams.items():
        kind = "string" if isinstance(value, str) else "bool" if isinstance(value, bool) else "number"
        setattr(start.hparams[name], f"{kind}_value", value)
        code = {"string": "DATA_TYPE_STRING", "bool": "DATA_TYPE_BOOL", "number": "DATA_TYPE_FLOAT64"}[kind]
        infos.append(api_pb2.HParamInfo(name=name, type=api_pb2.DataType.Value(code)))
    metrics = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in METRICS]
    experiment = api_pb2.Experiment(hparam_infos=infos, metric_infos=metrics)
    data = plugin_data_pb2.HParamsPluginData
    return [
        _of_hparams(metadata.EXPERIMENT_TAG, data(experiment=experiment)),
        _of_hparams(metadata.SESSION_START_INFO_TAG, data(session_start_info=start)),
    ]


def end_value(time_s: float) -> Any:
    """Return the hparams page's end-of-run value."""
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    end = plugin_data_pb2.SessionEndInfo(status=api_pb2.Status.Value("STATUS_SUCCESS"), end_time_secs=time_s)
    return _of_hparams(metadata.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=end))


def _of_hparams(tag: str, content: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata

    return Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(content), tensor=metadata.NULL_TENSOR)


def histogram_value(tag: str, numbers: Sequence[float], num_bins: int = 30) -> Any:
    """Return a histogram of the finite `numbers` over `num_bins` bins of equal width."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    values = np.asarray([number for number in numbers if np.isfinite(number)], dtype=np.float64)
    values = values if values.size else np.zeros(1)
    counts, limits = np.histogram(values, bins=num_bins)
    proto = HistogramProto(
        min=values.min(),
        max=values.max(),
        num=values.size,
        sum=values.sum(),
        sum_squares=(values**2).sum(),
        bucket_limit=limits.tolist(),  # the first closes an empty bucket that begins at minus infinity
        bucket=[0.0, *counts.astype(float).tolist()],
    )
    return Summary.Value(tag=tag, histo=proto)


def _of_text(tag: str, plugin: str, text: bytes) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto

    return Summary.Value(
        tag=tag,
        tensor=TensorProto(dtype="DT_STRING", string_val=[text]),
        metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=plugin)),
    )
