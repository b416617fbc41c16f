"""MLflow, Aim and trackio: the calls that their packages receive, against stand-ins with the packages' signatures."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from zengine.config.keys.telemetry import Aim, Mlflow, Trackio
from zengine.step_report import StepReport
from zengine.telemetry.sinks.aim import AimSink
from zengine.telemetry.sinks.base import Sink
from zengine.telemetry.sinks.mlflow import MAX_METRICS, MlflowSink, allowed
from zengine.telemetry.sinks.trackio import TrackioSink
from zengine.telemetry.snapshot import Snapshot
from zengine.telemetry.subject import RunRecord

Calls = list[tuple[Any, ...]]
RECORD = RunRecord(started="", config={}, plan=[], environment={}, hparams={"lr": 0.1, "stage": 2})


def snapshot(step: int, layer_norms: Mapping[str, float] | None = None) -> Snapshot:
    report = StepReport(
        applied=True, reason="", step=step, applied_steps=step, skipped_steps=0, samples=8 * step,
        loss=2.5, grad_norm=1.0, loss_scale=1.0, lr=(0.1,),
    )  # fmt: skip
    return Snapshot(report=report, layer_norms=layer_norms or {})


def install(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


def drive(sink: Sink) -> None:
    sink.begin(RECORD)
    sink.write(snapshot(1))
    sink.write_events([("eval/loss", 1.5, 3)])
    sink.close()


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls: Calls = []

    class MlflowClient:
        def __init__(self, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:
            calls.append(("client", tracking_uri))

        def get_experiment_by_name(self, name: str) -> Any:
            return SimpleNamespace(experiment_id="7") if name == "old" else None

        def create_experiment(self, name: str) -> str:
            calls.append(("experiment", name))
            return "8"

        def create_run(self, experiment_id: str, *, run_name: str | None = None) -> Any:
            calls.append(("run", experiment_id, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id="r"))

        def update_run(self, run_id: str, status: str | None = None, name: str | None = None) -> None:
            calls.append(("again", run_id, status))

        def get_run(self, run_id: str) -> Any:
            return SimpleNamespace(data=SimpleNamespace(params={"lr": "0.5"}))

        def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
            assert len(metrics) <= 1000
            calls.append(("batch", run_id, [(m.key, m.value, m.step) for m in metrics], list(params)))

        def set_terminated(self, run_id: str) -> None:
            calls.append(("end", run_id))

    install(monkeypatch, "mlflow", MlflowClient=MlflowClient)
    install(
        monkeypatch,
        "mlflow.entities",
        Param=lambda key, value: (key, value),
        Metric=lambda key, value, timestamp, step: SimpleNamespace(key=key, value=value, step=step),
    )
    return calls


def test_mlflow_gets_a_run_of_its_own_and_two_batches_a_point(mlflow: Calls) -> None:
    drive(MlflowSink(Mlflow(enabled=True, tracking_uri="u", experiment="new", run_name="n")))
    assert mlflow[:4] == [
        ("client", "u"),
        ("experiment", "new"),
        ("run", "8", "n"),
        ("batch", "r", [], [("lr", "0.1"), ("stage", "2")]),
    ]
    theirs, ours, event = (batch[2] for batch in mlflow[4:7])
    assert ("Train/Samples/train_loss", 2.5, 8) in theirs
    assert ("train/loss", 2.5, 1) in ours
    assert {step for _, _, step in theirs} == {8}
    assert {step for _, _, step in ours} == {1}
    assert event == [("eval/loss", 1.5, 3)]
    assert mlflow[-1] == ("end", "r")


def test_mlflow_finds_an_experiment_and_continues_a_run(mlflow: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "old")
    MlflowSink(Mlflow(enabled=True))
    again = MlflowSink(Mlflow(enabled=True, run_id="x"))
    assert mlflow == [("client", None), ("run", "7", None), ("client", None), ("again", "x", "RUNNING")]
    again.begin(RECORD)
    assert mlflow[4:] == [("batch", "x", [], [("stage", "2")])], "MLflow rejects another value of a parameter"


def test_mlflow_gets_points_in_intervals_and_batches_that_it_takes(mlflow: Calls) -> None:
    sink = MlflowSink(Mlflow(enabled=True, samples_log_interval=20))
    del mlflow[:]
    for step in range(1, 6):
        sink.write(snapshot(step))
    assert [batch[2][0][2] for batch in mlflow] == [8, 1, 32, 4]
    del mlflow[:]
    sink.write(snapshot(9, {f"layer{place}": 1.0 for place in range(MAX_METRICS)}))
    assert len(mlflow) == 3
    assert allowed("a(b)/c d-1.0_x") == "a_b_/c d-1.0_x"


def test_aim_gets_every_tag_at_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Calls = []

    class Run(dict[str, Any]):
        def __init__(self, **options: Any) -> None:
            calls.append(("run", options))

        def track(self, value: Any, name: str, step: int) -> None:
            calls.append((name, value, step))

        def close(self) -> None:
            calls.append(("end", self["hparams"], vars(self)))

    install(monkeypatch, "aim", Run=Run)
    drive(AimSink(Aim(enabled=True, repo="r", run_name="n")))
    given = {"run_hash": None, "repo": "r", "experiment": None}
    assert calls[0] == ("run", {**given, "system_tracking_interval": None, "capture_terminal_logs": False})
    assert ("train/loss", 2.5, 1) in calls
    assert ("Train/Samples/train_loss", 2.5, 8) in calls
    assert calls[-2:] == [("eval/loss", 1.5, 3), ("end", {"lr": 0.1, "stage": 2}, {"name": "n"})]


def test_trackio_gets_two_calls_a_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Calls = []
    run = SimpleNamespace(
        config={},
        log=lambda metrics, step: calls.append((step, metrics)),
        finish=lambda: calls.append(("end", run.config)),
    )
    install(monkeypatch, "trackio", init=lambda **options: calls.append(("init", options)) or run)
    drive(TrackioSink(Trackio(enabled=True, project="p", group="g")))
    given = {"project": "p", "name": None, "group": "g", "space_id": None, "resume": "allow"}
    assert calls[0] == ("init", {**given, "embed": False, "auto_log_gpu": False, "auto_log_cpu": False})
    assert [call[0] for call in calls[1:]] == [8, 1, 3, "end"]
    assert calls[2][1]["train/loss"] == 2.5
    assert calls[-1] == ("end", {"lr": 0.1, "stage": 2})
