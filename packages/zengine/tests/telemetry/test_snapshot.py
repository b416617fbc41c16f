"""Tags: the names that dashboards know, and only what was measured."""

import math

from zengine.step_report import StepReport
from zengine.telemetry.comms import Tally
from zengine.telemetry.snapshot import RecentLoss, Snapshot
from zengine.telemetry.throughput import Rate
from zengine.telemetry.work import Fleet


def report(**changes):
    values = {
        "applied": True, "reason": "", "step": 3, "applied_steps": 3, "skipped_steps": 0, "samples": 96,
        "loss": 2.5, "grad_norm": 0.7, "loss_scale": 1.0, "lr": (1e-3,),
    }  # fmt: skip
    return StepReport(**{**values, **changes})


def test_a_bare_snapshot_has_the_training_tags_alone():
    assert Snapshot(report=report()).scalars() == {
        "Train/Samples/train_loss": 2.5,
        "Train/Samples/lr": 1e-3,
        "Train/Samples/grad_norm": 0.7,
        "Train/Samples/loss_scale": 1.0,
        "Train/Samples/skipped_steps": 0.0,
        "train/loss": 2.5,
        "train/learning_rate": 1e-3,
        "train/grad_norm": 0.7,
        "train/global_step": 3.0,
    }


def test_what_was_measured_has_its_tags():
    snapshot = Snapshot(
        report=report(),
        rate=Rate(samples=32, ms=500, steps=1, tokens=1024, flops=4e12, useful_flops=3e12, counted_flops=5e12),
        fleet=Fleet(num_devices=4, peak_tflops=15),
        epochs=(1.5,),
        phase_ms={"forward": 3.0, "backward_allreduce": 1.0},
        micro_ms={"forward": 1.5},
        memory={"process": 1000, "after_step": 900, "gathered units": 7},
        comms={"all_reduce": Tally(count=2, nbytes=64, ms=1.0)},
        layer_norms={"blocks.0": 0.5},
    )
    bare = Snapshot(report=report()).scalars()
    assert {tag: value for tag, value in snapshot.scalars().items() if tag not in bare} == {
        "Train/Samples/elapsed_time_ms_forward": 3.0,
        "Train/Samples/elapsed_time_ms_backward_allreduce": 1.0,
        "Train/Samples/elapsed_time_ms_forward_microstep": 1.5,
        "train/epoch": 1.5,
        "perf/samples_per_second": 64.0,
        "perf/tokens_per_second": 2048.0,
        "perf/step_time_ms": 500.0,
        "perf/tflops": 2.0,  # 4e12 in half a second, on four devices
        "perf/tflops_counted": 2.5,
        "perf/mfu": 0.1,
        "memory/process_bytes": 1000.0,
        "memory/after_step_bytes": 900.0,
        "memory/gathered_units_bytes": 7.0,
        "communication/all_reduce_bytes": 64.0,
        "communication/all_reduce_ms": 1.0,
        "gradients/blocks.0": 0.5,
    }


def test_deepspeeds_tags_lie_at_samples_and_ours_at_steps():
    snapshot = Snapshot(report=report(), phase_ms={"forward": 1.0}, memory={"process": 1})
    places = {tag: snapshot.x(tag) for tag in snapshot.scalars()}
    assert {place for tag, place in places.items() if tag.startswith("Train/Samples/")} == {96}
    assert {place for tag, place in places.items() if not tag.startswith("Train/Samples/")} == {3}


def test_further_parameter_groups_have_learning_rates_of_their_own():
    scalars = Snapshot(report=report(lr=(1.0, 2.0, 3.0))).scalars()
    assert [scalars[f"Train/Samples/lr{end}"] for end in ("", "_group_1", "_group_2")] == [1.0, 2.0, 3.0]


def test_a_run_without_parameter_groups_has_no_learning_rate():
    assert "Train/Samples/lr" not in Snapshot(report=report(lr=())).scalars()


def test_a_skipped_step_keeps_its_non_finite_numbers():
    scalars = Snapshot(report=report(applied=False, reason="overflow", grad_norm=math.inf, skipped_steps=1)).scalars()
    assert scalars["Train/Samples/grad_norm"] == math.inf
    assert scalars["Train/Samples/skipped_steps"] == 1


def test_the_recent_loss_is_the_mean_of_the_last_steps_that_were_applied():
    recent = RecentLoss(3)
    losses = [(1.0, True), (3.0, True), (math.inf, False), (5.0, True), (math.nan, False), (math.inf, False)]
    assert [recent.add(report(loss=loss, applied=applied)) for loss, applied in losses] == [1, 2, 2, 4, 5, 5]
    assert recent.add(report(loss=7.0, applied=False)) == 7.0  # all were skipped
    recent.clear()
    assert recent.add(report(loss=8.0)) == 8.0
