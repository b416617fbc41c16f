"""TensorBoard events, read back with TensorBoard's own reader."""

import math
import os
import re
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from zengine.step_report import StepReport
from zengine.telemetry.comms import Tally
from zengine.telemetry.sinks.tensorboard import GROUPS, LAYOUT, TensorBoardSink, histogram_value, shown, tag_of
from zengine.telemetry.snapshot import Snapshot
from zengine.telemetry.spans import TIMERS
from zengine.telemetry.subject import RunRecord
from zengine.telemetry.throughput import Rate
from zengine.telemetry.work import Fleet


def snapshot(samples, loss=1.0, **measured):
    report = StepReport(
        applied=True, reason="", step=samples // 8, applied_steps=1, skipped_steps=0, samples=samples,
        loss=loss, grad_norm=1.0, loss_scale=1.0, lr=(0.1, 0.2),
    )  # fmt: skip
    return Snapshot(report=report, **measured)


def everything(samples):
    """A snapshot with every kind of measurement."""
    timers = dict.fromkeys(TIMERS, 1.0)
    return snapshot(
        samples,
        rate=Rate(samples=8, ms=10, steps=1, tokens=5, flops=1.0, useful_flops=1.0, counted_flops=1.0),
        fleet=Fleet(peak_tflops=1.0),
        epochs=(0.5,),
        phase_ms=timers,
        micro_ms=timers,
        memory={
            "process": 1,
            "process_peak": 2,
            "cuda": 3,
            "cuda_peak": 4,
            "cuda_reserved": 5,
            "after_step": 6,
            "gathered units": 7,
        },
        comms={"all_reduce": Tally(count=1, nbytes=2, ms=3.0)},
    )


def read(folder):
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def points(folder, tag="Train/Samples/train_loss"):
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def names_of(found):
    """Values of a snapshot by the name that TensorBoard shows; the times of a step have two."""
    scalars = found.scalars()
    theirs = {tag: value for tag, value in scalars.items() if tag.startswith("Train/Samples/")}
    times = {f"3 time/ms_{timer}": ms for timer, ms in found.phase_ms.items()}
    return {**theirs, **times, **{shown(tag): value for tag, value in scalars.items() if tag not in theirs}}


def test_the_page_opens_on_loss_speed_and_time_and_deepspeeds_tags_are_a_group_below():
    names = sorted(names_of(everything(32)))  # as the page sorts: by character
    groups = list(dict.fromkeys(name.split("/")[0] for name in names))
    assert groups[:4] == ["1 loss", "2 speed", "3 time", "4 training"]
    assert groups[-1] == "Train"
    assert [name for name in names if name.startswith("1 ")] == ["1 loss/loss"]


def test_names_lead_back_to_tags():
    tags = [tag for tag in everything(32).scalars() if not tag.startswith("Train/Samples/")]
    assert [tag_of(shown(tag)) for tag in tags] == tags
    assert {shown(tag).split("/")[0] + "/" for tag in tags} <= {
        group.split("/")[0] + "/" for group in GROUPS.values()
    }
    assert tag_of("3 time/ms_step") == ""
    assert tag_of("Train/Samples/lr") == "Train/Samples/lr"
    assert tag_of("eval/loss") == "eval/loss" == shown("eval/loss")


def test_every_scalar_is_read_back_on_its_axis(tmp_path):
    sink = TensorBoardSink(tmp_path / "runs" / "a")
    sink.write(everything(32))
    sink.write(everything(64))
    sink.close()
    accumulator = read(tmp_path / "runs" / "a")
    expected = names_of(everything(32))
    expected.pop("4 training/global_step")
    assert [(e.step, e.value) for e in accumulator.Scalars("4 training/global_step")] == [(4, 4), (8, 8)]
    assert set(accumulator.Tags()["scalars"]) == {*expected, "4 training/global_step"}
    for tag, value in expected.items():
        assert [(event.step, event.value) for event in accumulator.Scalars(tag)] == [
            (32 if "Samples" in tag else 4, pytest.approx(value)),
            (64 if "Samples" in tag else 8, pytest.approx(value)),
        ]


def test_a_boundary_is_an_event_for_each_axis(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.write(everything(32))
    sink.write(everything(64))
    sink.close()
    (file,) = tmp_path.iterdir()
    events = [event for event in LegacyEventFileLoader(str(file)).Load() if event.step]
    sizes = [(event.step, len(event.summary.value)) for event in events if event.HasField("summary")]
    assert [step for step, _ in sizes] == [32, 4, 64, 8]
    assert sizes[0][1] + sizes[1][1] == len(names_of(everything(32)))


def test_what_is_written_can_be_read_before_the_file_is_closed(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.write(snapshot(32, 2.5))
    assert points(tmp_path) == [(32, 2.5)]
    sink.close()


def test_a_resumed_run_in_the_same_folder_replaces_the_steps_that_were_lost(tmp_path):
    killed = TensorBoardSink(tmp_path)
    for samples in (10, 20, 30, 40):
        killed.write(snapshot(samples, samples / 10))
    resumed = TensorBoardSink(tmp_path)
    for samples in (30, 40, 50):
        resumed.write(snapshot(samples, -samples / 10))
    assert points(tmp_path) == [(10, 1), (20, 2), (30, -3), (40, -4), (50, -5)]
    killed.close()
    resumed.close()


def test_two_sinks_in_one_second_have_files_of_their_own(tmp_path):
    sinks = [TensorBoardSink(tmp_path) for _ in range(3)]
    for sink in sinks:
        sink.close()
    names = [path.name for path in tmp_path.iterdir()]
    assert len(names) == 3
    assert all("tfevents" in name and f".{os.getpid()}." in name for name in names)


def test_scalars_of_the_program_lie_where_it_says(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.write_events([("eval/loss", 1.5, 7), ("eval/loss", 1.25, 9)])
    sink.close()
    assert points(tmp_path, "eval/loss") == [(7, 1.5), (9, 1.25)]


def test_nan_and_infinity_are_kept(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.write(snapshot(1, math.nan))
    sink.write(snapshot(2, math.inf))
    sink.close()
    (_, nan), (_, inf) = points(tmp_path)
    assert math.isnan(nan)
    assert inf == math.inf


def test_the_layout_is_stored_and_draws_every_tag_in_exactly_one_chart(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.write(everything(32))
    sink.close()
    (event,) = read(tmp_path).Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == list(LAYOUT)
    charts = [chart for category in layout.category for chart in category.chart]
    for tag in names_of(everything(0)):
        drawn = [chart.title for chart in charts if any(re.match(pattern, tag) for pattern in chart.multiline.tag)]
        assert len(drawn) == 1, (tag, drawn)


RECORD = RunRecord(
    started="now",
    config={"train_batch_size": 8},
    plan=[("a|b", 1, "dict")],
    environment={"torch": "2"},
    hparams={"lr": 0.1, "optimizer": "AdamW", "nesterov": True},
)


def test_the_hparams_page_knows_what_the_run_has_and_which_tags_to_compare(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.begin(RECORD)
    sink.write(everything(32))
    sink.close()
    metadata = read(tmp_path).summary_metadata
    content = {
        tag: plugin_data_pb2.HParamsPluginData.FromString(metadata[f"_hparams_/{tag}"].plugin_data.content)
        for tag in ("experiment", "session_start_info", "session_end_info")
    }
    start = content["session_start_info"].session_start_info.hparams
    assert start["lr"].number_value == 0.1
    assert start["optimizer"].string_value == "AdamW"
    assert start["nesterov"].bool_value is True
    tags = {info.name.tag for info in content["experiment"].experiment.metric_infos}
    assert tags <= set(names_of(everything(32)))
    assert content["session_end_info"].session_end_info.end_time_secs > 0


def test_config_plan_and_environment_are_texts(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.begin(RECORD)
    sink.close()
    accumulator = read(tmp_path)
    texts = {
        tag: accumulator.Tensors(f"run/{tag}")[0].tensor_proto.string_val[0].decode()
        for tag in ("config", "plan", "environment")
    }
    assert texts["config"].splitlines()[1] == '      "train_batch_size": 8'
    assert texts["plan"].splitlines()[-1] == "| a/b | 1 | dict |"
    assert "| torch | 2 |" in texts["environment"]


def test_norms_of_layers_are_curves_and_a_histogram(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.write(snapshot(8, layer_norms={"blocks.0": 1.0, "blocks.1": 3.0, "head": math.inf}))
    sink.write(snapshot(16))
    sink.close()
    accumulator = read(tmp_path)
    (event,) = accumulator.Histograms("7 gradients/norm_by_layer")
    assert event.step == 1
    assert (event.histogram_value.num, event.histogram_value.min, event.histogram_value.max) == (2, 1.0, 3.0)
    assert sum(event.histogram_value.bucket) == 2
    assert len(event.histogram_value.bucket) == len(event.histogram_value.bucket_limit)
    assert [event.value for event in accumulator.Scalars("7 gradients/blocks.1")] == [3.0]


def test_a_histogram_of_nothing_finite_is_one_zero():
    assert histogram_value("x", [math.nan]).histo.num == 1


def test_importing_telemetry_does_not_import_tensorboard():
    code = "import sys, zengine.telemetry; sys.exit(any(name.split('.')[0] == 'tensorboard' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
