"""Lines for people."""

import math

import pytest

from zengine.step_report import StepReport
from zengine.telemetry.sinks.console import Console
from zengine.telemetry.snapshot import Snapshot
from zengine.telemetry.throughput import Rate

MIB = 2**20


def snapshot(step, *, rate=(), reason="", **measured):
    report = StepReport(
        applied=not reason, reason=reason, step=step, applied_steps=step, skipped_steps=0, samples=8 * step,
        loss=measured.pop("loss", 2.34567), grad_norm=0.91234,
        loss_scale=measured.pop("loss_scale", 1.0), lr=measured.pop("lr", (3e-4,)),
    )  # fmt: skip
    return Snapshot(report=report, rate=Rate(**dict(zip(("samples", "ms", "steps"), rate))), **measured)


def console(interval, table="", farewell=""):
    return Console(interval, table=lambda: table, farewell=lambda: farewell)


def printed(capsys):
    return capsys.readouterr().out.splitlines()


def test_a_line_is_printed_every_interval_with_means_since_the_one_before(capsys):
    sink = console(2)
    for step, ms in enumerate([1000, 100, 100, 300], start=1):
        sink.write(
            snapshot(
                step,
                rate=(8, ms, 1),
                phase_ms={"forward": ms / 10, "backward_allreduce": 1.0},
                memory={"process": 512 * MIB, "process_peak": 600 * MIB},
            )
        )
    assert printed(capsys) == [
        "step 2 | loss 2.3457 | lr 3.000e-04 | grad norm 0.912 | 14.5 samples/s | step 550.0 ms (forward 55.0, "
        "communication 1.0 ms) | memory 512 MiB, 600 MiB peak",
        "step 4 | loss 2.3457 | lr 3.000e-04 | grad norm 0.912 | 40.0 samples/s | step 200.0 ms (forward 20.0, "
        "communication 1.0 ms) | memory 512 MiB, 600 MiB peak",
    ]


def losses_of(lines):
    """(step, loss) of each line."""
    return [(line.split(" ")[1], line.split("loss ")[1].split(" ")[0]) for line in lines]


def test_the_loss_of_a_line_is_the_mean_since_the_one_before(capsys):
    sink = console(4)
    for step, loss in enumerate([4.0, 3.0, 2.0, 1.0, 9.0, 9.0, 9.0, 5.0, 0.5], start=1):
        sink.write(snapshot(step, loss=loss))
    assert losses_of(printed(capsys)) == [("4", "2.5000"), ("8", "8.0000")]


def test_a_skipped_step_shows_its_own_loss_and_leaves_the_mean_to_the_others(capsys):
    sink = console(3)
    for step, (loss, reason) in enumerate([(1.0, ""), (math.inf, "overflow"), (2.0, "")], start=1):
        sink.write(snapshot(step, loss=loss, reason=reason))
    assert losses_of(printed(capsys)) == [("2", "inf"), ("3", "1.5000")]


def test_a_loss_that_is_not_finite_and_was_applied_shows_in_the_mean(capsys):
    sink = console(2)
    for step, loss in enumerate([math.nan, 1.0, 2.0, 3.0], start=1):
        sink.write(snapshot(step, loss=loss))
    assert losses_of(printed(capsys)) == [("2", "nan"), ("4", "2.5000")]


def test_what_was_not_measured_is_left_out(capsys):
    console(1).write(snapshot(1))
    assert printed(capsys) == ["step 1 | loss 2.3457 | lr 3.000e-04 | grad norm 0.912"]


def test_phases_are_shown_without_throughput_too(capsys):
    console(1).write(snapshot(1, phase_ms={"forward": 2.0, "step": 1.0}))
    assert printed(capsys)[0].endswith("| (forward 2.0, step 1.0 ms)")


def test_loss_scale_groups_and_device_memory_are_shown_where_there_are_any(capsys):
    memory = {"process": MIB, "cuda": 2 * MIB, "cuda_peak": 3 * MIB, "after_forward": 4 * MIB, "after_step": 5 * MIB}
    console(1).write(snapshot(1, loss_scale=65536.0, lr=(1.0, 0.5), memory=memory))
    (line,) = printed(capsys)
    assert "lr 1.000e+00, 5.000e-01 |" in line
    assert "| loss scale 65536 |" in line
    assert line.endswith("memory 2 MiB, 3 MiB peak, after forward 4, after step 5 MiB")


def test_a_skipped_step_tells_its_reason_at_once(capsys):
    sink = console(10)
    sink.write(snapshot(1))
    sink.write(snapshot(2, reason="overflow in layer.weight; loss scale halved"))
    (line,) = printed(capsys)
    assert line.startswith("step 2 SKIPPED: overflow in layer.weight; loss scale halved | loss")


def test_the_table_follows_each_line_and_the_farewell_ends(capsys):
    sink = console(2, table="a table", farewell="bye")
    for step in (1, 2):
        sink.write(snapshot(step))
    sink.close()
    assert [line[:7] for line in printed(capsys)] == ["step 2 ", "a table", "bye"]


@pytest.mark.parametrize("reason", ["", "overflow"])
def test_interval_0_prints_nothing_but_the_farewell(capsys, reason):
    sink = console(0, table="a table", farewell="bye")
    sink.write(snapshot(1, reason=reason))
    assert printed(capsys) == []
    sink.close()
    assert printed(capsys) == ["bye"]
