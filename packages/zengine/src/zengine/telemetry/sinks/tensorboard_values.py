"""Summary values for TensorBoard's plugins: chart layout, hparams, texts, histograms.

Packages of the plugins are imported when a value is made, so only runs that write events pay for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zengine.telemetry.subject import RunRecord

# What the hparams page shows of a run: the last value of these tags.
METRICS = ("train/loss", "perf/tokens_per_second", "perf/samples_per_second", "perf/tflops", "perf/mfu")


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
