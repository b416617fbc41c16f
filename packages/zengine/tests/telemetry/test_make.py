"""make_telemetry: the parts that a plan enables, and nothing imported where it enables none."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from zengine.config import Facts, load, resolve
from zengine.config.keys.telemetry import EventFiles
from zengine.config.plan.telemetry import RatePlan, TelemetryPlan
from zengine.telemetry import Silent, Telemetry, make_telemetry
from zengine.telemetry.spans import NoStopwatch
from zengine.telemetry.throughput import NoThroughput


def make(**asked):
    plan = TelemetryPlan(**asked)
    return make_telemetry(plan, device=torch.device("cpu"), rank=0, micro_batch_size=1, batch_size=4, replicas=4)


def test_what_is_not_asked_for_is_an_identity():
    telemetry = make(steps_per_print=1, throughput=False)
    assert isinstance(telemetry.stopwatch, NoStopwatch)
    assert isinstance(telemetry.throughput, NoThroughput)
    assert len({id(span) for span in telemetry.spans.values()}) == 1


def test_the_rates_of_the_config_arrive():
    rates = RatePlan(warmup_steps=5, tokens_per_sample=7, peak_tflops=3.0)
    telemetry = make(steps_per_print=1, bench_steps=2, rates=rates)
    assert telemetry.throughput._warmup_steps == 5
    assert telemetry.meter.tokens_per_sample == 7
    assert (telemetry.fleet.num_devices, telemetry.fleet.peak_tflops) == (4, 3.0)
    assert telemetry.countdown.steps == 7


@pytest.mark.parametrize(
    ("asked", "titles"),
    [
        ({}, {"Training", "Speed", "Memory"}),
        ({"wall_clock_breakdown": True, "throughput": False}, {"Training", "Phases", "Memory"}),
        (
            {"comms_log": True, "gradient_histograms": 5},
            {"Training", "Speed", "Memory", "Communication", "Gradients"},
        ),
    ],
)
def test_charts_that_would_stay_empty_are_not_laid_out(tmp_path, asked, titles):
    make(tensorboard=EventFiles(enabled=True, output_path=str(tmp_path), job_name=""), **asked).close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Tensors("custom_scalars__config__")
    sections = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0]).category
    assert {section.title for section in sections} == {*titles, "DeepSpeed's tags, and the step"}
    assert "MFU" not in {chart.title for section in sections for chart in section.chart}


def chosen(rank: int = 0, **config: object) -> object:
    plan = resolve(load({"train_batch_size": 1, **config}), Facts(world_size=1, replicas=1))
    sizes = {"micro_batch_size": 1, "batch_size": 1, "replicas": 1}
    return make_telemetry(plan.telemetry, device=torch.device("cpu"), rank=rank, **sizes)


def test_what_is_asked_for_decides():
    assert isinstance(chosen(), Silent)
    assert isinstance(chosen(steps_per_print=1), Telemetry)
    assert isinstance(chosen(rank=1, steps_per_print=1), Silent)


def test_silence_imports_no_sink():
    code = (
        "import sys, zengine.telemetry; assert 'zengine.telemetry.telemetry' not in sys.modules; "
        "assert 'zengine.telemetry.sinks.tensorboard' not in sys.modules; zengine.telemetry.Telemetry"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
