"""The folder of a run."""

import json
import math

from zengine.step_report import StepReport
from zengine.telemetry.sinks.jsonl import JsonlSink
from zengine.telemetry.snapshot import Snapshot
from zengine.telemetry.subject import RunRecord

RECORD = RunRecord(
    started="2026-01-01T00:00:00+00:00",
    config={"train_batch_size": 8},
    plan=[("train_batch_size", 8, "dict")],
    environment={"world_size": 2},
    hparams={"lr": 0.1},
)


def snapshot(step, loss=2.5):
    report = StepReport(
        applied=True, reason="", step=step, applied_steps=step, skipped_steps=0, samples=8 * step,
        loss=loss, grad_norm=math.inf, loss_scale=1.0, lr=(0.1,),
    )  # fmt: skip
    return Snapshot(report=report)


def strict(text):
    """JSON as every reader knows it: no NaN."""
    return json.loads(text, parse_constant=lambda word: 1 / 0)


def test_a_line_a_boundary_with_step_samples_time_and_every_value(tmp_path):
    now = [10.0]
    sink = JsonlSink(tmp_path / "runs" / "a", lambda: now[0])
    for step in (1, 2):
        now[0] += 0.25
        sink.write(snapshot(step))
    lines = [strict(line) for line in (tmp_path / "runs" / "a" / "events.jsonl").read_text().splitlines()]
    assert [(line["step"], line["samples"], line["time_s"]) for line in lines] == [(1, 8, 0.25), (2, 16, 0.5)]
    assert set(lines[0]["values"]) == set(snapshot(1).scalars())
    assert lines[0]["values"]["train/loss"] == 2.5
    sink.close()


def test_numbers_that_json_does_not_know_are_words(tmp_path):
    sink = JsonlSink(tmp_path)
    for loss in (math.nan, -math.inf):
        sink.write(snapshot(1, loss))
    lines = [strict(line)["values"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["train/loss"] for line in lines] == ["NaN", "-Infinity"]
    assert lines[0]["train/grad_norm"] == "Infinity"
    sink.close()


def test_scalars_of_the_program_ride_with_the_next_boundary_or_the_end(tmp_path):
    sink = JsonlSink(tmp_path)
    sink.write_events([("eval/loss", 3.0, 8)])
    sink.write(snapshot(1))
    sink.write_events([("eval/loss", math.inf, 8)])
    sink.close()
    lines = [strict(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(line["step"], line["values"]["eval/loss"]) for line in lines] == [(1, 3.0), (1, "Infinity")]
    assert "train/loss" in lines[0]["values"]
    assert lines[1]["values"].keys() == {"eval/loss"}


def test_a_resumed_run_continues_the_events_and_replaces_the_record(tmp_path):
    for step in (1, 2):
        sink = JsonlSink(tmp_path)
        sink.begin(RECORD)
        sink.write(snapshot(step))
        sink.close()
    assert [strict(line)["step"] for line in (tmp_path / "events.jsonl").read_text().splitlines()] == [1, 2]
    record = strict((tmp_path / "run.json").read_text())
    assert record["plan"] == [["train_batch_size", 8, "dict"]]
    assert set(record) == {"started", "config", "plan", "environment", "hparams"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "run.json"]
