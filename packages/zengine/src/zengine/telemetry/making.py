"""Which telemetry a plan asks for: the one place that chooses between the parts and their identities."""

from __future__ import annotations

import torch

import zcomm
from zengine.telemetry.choosing import Scope
from zengine.telemetry.comms import CommsLog, NoCommsLog
from zengine.telemetry.countdown import make_countdown
from zengine.telemetry.devices import Fleet, peak_of
from zengine.telemetry.instants import DeviceInstants
from zengine.telemetry.memory import MemoryMarks, NoMemoryMarks, Owners
from zengine.telemetry.plans import TelemetryPlanLike
from zengine.telemetry.silent import Silent
from zengine.telemetry.sinks import (
    Bench,
    CometSink,
    Console,
    CsvSink,
    JsonlSink,
    Sinks,
    TensorBoardSink,
    WandbSink,
    folder_of,
    require_packages,
)
from zengine.telemetry.snapshot import RecentLoss
from zengine.telemetry.spans import NoStopwatch, Stopwatch, make_spans
from zengine.telemetry.telemetry import Telemetry
from zengine.telemetry.throughput import NoThroughput, Rate, Throughput
from zengine.telemetry.work import Meter


def telemetry_of(plan: TelemetryPlanLike, scope: Scope) -> Telemetry | Silent:
    """What `choosing.make_telemetry` gives for a plan that asks for something."""
    require_packages(plan)
    countdown = make_countdown(plan.bench_steps, plan.rates.warmup_steps)
    if scope.rank != 0:
        return Silent(countdown)
    stopwatch = _make_stopwatch(scope.device) if plan.wall_clock_breakdown else NoStopwatch()
    marks = MemoryMarks(scope.device) if plan.memory_breakdown else NoMemoryMarks()
    throughput = Throughput(warmup_steps=plan.rates.warmup_steps) if plan.throughput else NoThroughput()
    comms = CommsLog(zcomm.traced, plan.comms_ops) if plan.comms_log else NoCommsLog()

    def farewell() -> str:
        batch = f"batch {scope.batch_size}, micro-batch {scope.micro_batch_size}"
        return "\n".join(filter(None, [_mean_rate(plan, throughput.total, batch), comms.table()]))

    fleet = Fleet(num_devices=scope.num_devices, peak_tflops=plan.rates.peak_tflops or peak_of(scope.device))
    sinks = _open_monitors(plan, fleet)
    if plan.steps_per_print or plan.comms_log:
        sinks.add("console", lambda: Console(plan.steps_per_print, table=comms.table, farewell=farewell))
    if plan.bench_steps:
        sinks.add("bench summary", lambda: Bench(plan.bench_steps))
    return Telemetry(
        device=scope.device,
        sinks=sinks,
        stopwatch=stopwatch,
        throughput=throughput,
        marks=marks,
        comms=comms,
        spans=make_spans((*stopwatch.observers(), *marks.observers())),
        meter=Meter(replicas=scope.replicas, pieces=scope.pieces, tokens_per_sample=plan.rates.tokens_per_sample),
        fleet=fleet,
        owners=Owners(always=plan.memory_breakdown),
        recent_loss=RecentLoss(max(1, plan.steps_per_print)),
        countdown=countdown,
    )


def _make_stopwatch(device: torch.device) -> Stopwatch:
    return Stopwatch(zcomm.traced, DeviceInstants()) if device.type == "cuda" else Stopwatch(zcomm.traced)


def _empty_charts(plan: TelemetryPlanLike, fleet: Fleet) -> list[str]:
    """Sections and charts that have nothing to show in this run."""
    needs = {
        "Speed": plan.throughput,
        "MFU": fleet.peak_tflops > 0,
        "Phases": plan.wall_clock_breakdown,
        "bytes after each phase": plan.memory_breakdown,
        "Communication": plan.comms_log,
        "Gradients": plan.gradient_histograms > 0,
    }
    return [name for name, is_there in needs.items() if not is_there]


def _open_monitors(plan: TelemetryPlanLike, fleet: Fleet) -> Sinks:
    sinks = Sinks()
    if plan.tensorboard.enabled:
        folder = folder_of(plan.tensorboard)
        sinks.add(f"TensorBoard events in {folder}", lambda: TensorBoardSink(folder, _empty_charts(plan, fleet)))
    if plan.csv_monitor.enabled:
        place = folder_of(plan.csv_monitor)
        sinks.add(f"CSV files in {place}", lambda: CsvSink(place))
    if plan.jsonl_monitor.enabled:
        run = folder_of(plan.jsonl_monitor)
        sinks.add(f"run.json and events.jsonl in {run}", lambda: JsonlSink(run))
    if plan.wandb.enabled:
        sinks.add(f"Weights & Biases project {plan.wandb.project!r}", lambda: WandbSink(plan.wandb))
    if plan.comet.enabled:
        sinks.add(f"Comet project {plan.comet.project!r}", lambda: CometSink(plan.comet))
    return sinks


def _mean_rate(plan: TelemetryPlanLike, total: Rate, batch: str) -> str:
    if not (total and plan.steps_per_print):
        return ""
    return (
        f"throughput: {total.samples_per_s:.1f} samples/s, {total.step_ms:.1f} ms a step "
        f"(mean of {total.steps} steps; {batch})"
    )
