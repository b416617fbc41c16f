"""Tags: the names that dashboards know, and only what was measured."""

import math

from zengine.report import StepReport
from zengine.telemetry.comms import Tally
from zengine.telemetry.snapshot import Snapshot
from zengine.telemetry.throughput import Rate


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
    }


def test_what_was_measured_has_its_tags():
    snapshot = Snapshot(
        report=report(),
        rate=Rate(samples=32, ms=500, steps=1),
        phase_ms={"forward": 3.0, "backward_allreduce": 1.0},
        micro_ms={"forward": 1.5},
        memory={"process": 1000, "after_step": 900},
        comms={"all_reduce": Tally(count=2, nbytes=64, ms=1.0)},
    )
    scalars = snapshot.scalars()
    assert {tag: value for tag, value in scalars.items() if "Train" not in tag or "elapsed" in tag} == {
        "Train/Samples/elapsed_time_ms_forward": 3.0,
        "Train/Samples/elapsed_time_ms_backward_allreduce": 1.0,
        "Train/Samples/elapsed_time_ms_forward_microstep": 1.5,
        "Throughput/samples_per_s": 64.0,
        "Throughput/step_ms": 500.0,
        "Memory/process_bytes": 1000.0,
        "Memory/after_step_bytes": 900.0,
        "Communication/all_reduce_bytes": 64.0,
        "Communication/all_reduce_ms": 1.0,
    }


def test_further_parameter_groups_have_learning_rates_of_their_own():
    scalars = Snapshot(report=report(lr=(1.0, 2.0, 3.0))).scalars()
    assert [scalars[f"Train/Samples/lr{end}"] for end in ("", "_group_1", "_group_2")] == [1.0, 2.0, 3.0]


def test_a_run_without_parameter_groups_has_no_learning_rate():
    assert "Train/Samples/lr" not in Snapshot(report=report(lr=())).scalars()


def test_a_skipped_step_keeps_its_non_finite_numbers():
    scalars = Snapshot(report=report(applied=False, reason="overflow", grad_norm=math.inf, skipped_steps=1)).scalars()
    assert scalars["Train/Samples/grad_norm"] == math.inf
    assert scalars["Train/Samples/skipped_steps"] == 1
