"""The telemetry slot as the engine uses it: silent, or everything together."""

import csv
import io
import logging
import sys
import time
from contextlib import redirect_stdout

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import zcomm
from zcomm.testing import run_ranks
from zengine.config.keys.telemetry import EventFiles as Monitor
from zengine.config.plan.telemetry import TelemetryPlan as Plan
from zengine.step_report import StepReport
from zengine.telemetry import MissingPackageError, Silent, Telemetry, make_telemetry
from zengine.telemetry.sinks.tensorboard import tag_of
from zengine.telemetry.spans import MICRO, TIMERS

CPU = torch.device("cpu")


def make(plan, rank=0):
    return make_telemetry(plan, device=CPU, rank=rank, micro_batch_size=2, batch_size=8, replicas=2)


def report(step, **changes):
    values = {
        "applied": True, "reason": "", "step": step, "applied_steps": step, "skipped_steps": 0, "samples": 8 * step,
        "loss": 1.0 / step, "grad_norm": 1.0, "loss_scale": 1.0, "lr": (0.1,),
    }  # fmt: skip
    return StepReport(**{**values, **changes})


def train(telemetry, steps, accumulation=2):
    """The calls that an engine makes."""
    for step in range(1, steps + 1):
        for micro in range(accumulation):
            with telemetry.span("forward"):
                pass
            with telemetry.span("backward"):
                pass
            if micro == accumulation - 1:
                with telemetry.span("step"):
                    pass
                telemetry.step_end(report(step))
            telemetry.micro_step_end()


def scalars(folder):
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    names = accumulator.Tags()["scalars"]
    return {tag_of(name): [e.step for e in accumulator.Scalars(name)] for name in names if tag_of(name)}


def test_nothing_asked_for_is_silent_although_throughput_is_on_by_default():
    assert isinstance(make(Plan()), Silent)


@pytest.mark.parametrize(
    "asked",
    [
        {"steps_per_print": 1},
        {"wall_clock_breakdown": True},
        {"memory_breakdown": True},
        {"comms_log": True},
        {"tensorboard": Monitor(enabled=True)},
        {"csv_monitor": Monitor(enabled=True)},
        {"jsonl_monitor": Monitor(enabled=True)},
        {"bench_steps": 1},
    ],
)
def test_anything_asked_for_is_measured_on_rank_0_and_only_there(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    telemetry = make(Plan(**asked))
    assert isinstance(telemetry, Telemetry)
    telemetry.close()
    written = set(tmp_path.iterdir())
    assert isinstance(make(Plan(**asked), rank=1), Silent)
    assert set(tmp_path.iterdir()) == written


def test_both_families_of_timers_reach_tensorboard_at_the_number_of_samples(tmp_path):
    monitor = Monitor(enabled=True, output_path=str(tmp_path), job_name="job")
    telemetry = make(Plan(wall_clock_breakdown=True, tensorboard=monitor))
    train(telemetry, 4)
    telemetry.close()
    events = scalars(tmp_path / "job")
    for timer in set(TIMERS) - {"data", "checkpoint"}:
        assert events[f"Train/Samples/elapsed_time_ms_{timer}"] == [8, 16, 24, 32]
        assert events[f"Train/Samples/elapsed_time_ms_{timer}{MICRO}"] == [8, 16, 24, 32]
    assert events["perf/samples_per_second"] == [3, 4]
    assert events["memory/process_bytes"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("steps_per_print", "ours"), [(0, [1.0, 1 / 2, 1 / 3, 1 / 4]), (2, [1.0, 3 / 4, 5 / 12, 7 / 24])]
)
def test_our_loss_is_the_mean_of_the_interval_and_deepspeeds_that_of_the_step(tmp_path, steps_per_print, ours):
    monitor = Monitor(enabled=True, output_path=str(tmp_path), job_name="job")
    telemetry = make(Plan(csv_monitor=monitor, steps_per_print=steps_per_print))
    train(telemetry, 4)
    telemetry.close()
    for name, expected in (("train_loss", ours), ("Train_Samples_train_loss", [1.0, 1 / 2, 1 / 3, 1 / 4])):
        with open(tmp_path / "job" / f"{name}.csv", newline="") as file:
            assert [float(value) for _, value in list(csv.reader(file))[1:]] == pytest.approx(expected), name


def test_a_resumed_run_begins_its_interval_afresh(tmp_path):
    telemetry = make(
        Plan(csv_monitor=Monitor(enabled=True, output_path=str(tmp_path), job_name=""), steps_per_print=8)
    )
    train(telemetry, 2)
    telemetry.load_state_dict({})
    telemetry.step_end(report(5))
    telemetry.close()
    with open(tmp_path / "train_loss.csv", newline="") as file:
        assert list(csv.reader(file))[1:] == [["1", "1.0"], ["2", "0.75"], ["5", "0.2"]]


def test_without_the_breakdown_no_phase_is_timed(tmp_path):
    telemetry = make(
        Plan(tensorboard=Monitor(enabled=True, output_path=str(tmp_path), job_name=""), throughput=False)
    )
    train(telemetry, 4)
    telemetry.close()
    assert not [tag for tag in scalars(tmp_path) if "elapsed" in tag or "perf" in tag or "after" in tag]


def test_times_are_those_of_the_phases():
    telemetry = make(Plan(wall_clock_breakdown=True))
    with telemetry.span("forward"):
        time.sleep(0.02)
    telemetry.micro_step_end()
    with telemetry.span("backward"):
        time.sleep(0.001)
    micro, total = telemetry.stopwatch.micro_ms(), telemetry.stopwatch.total_ms()
    assert micro["forward"] == 0 < micro["backward"]
    assert total["forward"] >= 20
    telemetry.step_end(report(1))
    assert set(telemetry.stopwatch.total_ms().values()) == {0.0}


def communicate_in_and_between_phases():
    """On each rank: what rank 0's telemetry measured of real collectives, and what it printed."""
    rank = zcomm.group_rank()
    telemetry = make(Plan(wall_clock_breakdown=True, comms_log=True, steps_per_print=1), rank=rank)
    tensor = torch.ones(256)
    printed = io.StringIO()
    with redirect_stdout(printed):
        zcomm.all_reduce(tensor)
        with telemetry.span("forward"):
            pass
        before = telemetry.stopwatch.total_ms()["backward_allreduce"] if rank == 0 else 0.0
        with telemetry.span("backward"):
            handle = zcomm.all_reduce(tensor, async_op=True)
        with telemetry.span("step"):
            handle.wait()
        after = telemetry.stopwatch.total_ms()["backward_allreduce"] if rank == 0 else 0.0
        telemetry.step_end(report(1))
        telemetry.close()
        zcomm.all_reduce(tensor)
    return before, after, printed.getvalue(), telemetry.comms.table() if rank == 0 else ""


def test_collectives_are_timed_inside_phases_and_tallied_everywhere():
    (before, after, printed, table), (_, _, printed_elsewhere, _) = run_ranks(communicate_in_and_between_phases, 2)
    assert before == 0 < after
    tables = [line.split()[:5] for line in printed.splitlines() if line.startswith("all_reduce")]
    assert tables == [["all_reduce", "1", "KiB", "2", "2"]] * 2  # with the line of the step, and at the end
    assert printed_elsewhere == ""
    assert table in printed  # nothing is counted after close


def test_a_forward_without_gradients_is_not_part_of_the_step():
    telemetry = make(Plan(wall_clock_breakdown=True))
    with torch.no_grad(), telemetry.paused(), telemetry.span("forward"), telemetry.span("forward"):
        pass
    assert telemetry.stopwatch.total_ms()["forward"] == 0
    with telemetry.span("forward"):
        pass
    assert telemetry.stopwatch.total_ms()["forward"] > 0


def test_memory_breakdown_marks_each_phase(tmp_path):
    telemetry = make(
        Plan(memory_breakdown=True, tensorboard=Monitor(enabled=True, output_path=str(tmp_path), job_name=""))
    )
    train(telemetry, 1)
    telemetry.close()
    assert {f"memory/after_{phase}_bytes" for phase in ("forward", "backward", "step")} <= set(scalars(tmp_path))


def test_csv_files_are_written(tmp_path):
    telemetry = make(Plan(csv_monitor=Monitor(enabled=True, output_path=str(tmp_path), job_name="job")))
    train(telemetry, 2)
    telemetry.close()
    with open(tmp_path / "job" / "Train_Samples_train_loss.csv", newline="") as file:
        assert list(csv.reader(file)) == [["step", "train_loss"], ["8", "1.0"], ["16", "0.5"]]


def test_the_console_tells_steps_and_at_the_end_the_mean_rate(capsys):
    telemetry = make(Plan(steps_per_print=2))
    train(telemetry, 4)
    telemetry.step_end(report(5, applied=False, reason="overflow"))
    telemetry.close()
    telemetry.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[:3]] == ["step 2", "step 4", "step 5 SKIPPED: overflow"]
    assert lines[3].startswith("throughput: ")
    assert lines[3].endswith("(mean of 3 steps; batch 8, micro-batch 2)")
    assert len(lines) == 4


def test_a_folder_that_cannot_be_written_warns_and_training_goes_on(tmp_path, caplog, capsys):
    (tmp_path / "file").write_text("in the way")
    plan = Plan(
        steps_per_print=1, tensorboard=Monitor(enabled=True, output_path=str(tmp_path / "file"), job_name="job")
    )
    with caplog.at_level(logging.WARNING):
        telemetry = make(plan)
        train(telemetry, 2)
        telemetry.close()
    (record,) = caplog.records
    assert f"TensorBoard events in {tmp_path / 'file' / 'job'}" in record.getMessage()
    assert len(capsys.readouterr().out.splitlines()) >= 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_package_is_an_error_on_every_rank(monkeypatch, rank):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingPackageError, match="wandb"):
        make(Plan(wandb=Monitor(enabled=True)), rank=rank)


def test_after_loading_a_state_the_warm_up_begins_again(tmp_path):
    telemetry = make(Plan(tensorboard=Monitor(enabled=True, output_path=str(tmp_path), job_name="")))
    train(telemetry, 3)
    assert telemetry.state_dict() == {}
    telemetry.load_state_dict({})
    for step in (4, 5, 6):
        telemetry.step_end(report(step))
    telemetry.close()
    assert scalars(tmp_path)["perf/step_time_ms"] == [3, 6]


def test_an_unknown_phase_is_refused_with_the_names():
    telemetry = make(Plan(steps_per_print=1))
    with pytest.raises(
        ValueError, match=r"unknown phase 'forwards'; choose one of forward, backward, step, data, checkpoint"
    ):
        telemetry.span("forwards")
