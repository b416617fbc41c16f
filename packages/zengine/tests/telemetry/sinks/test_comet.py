"""Comet, against a stand-in for its package."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from zengine.config.keys.telemetry import Comet
from zengine.step_report import StepReport
from zengine.telemetry.sinks.comet import CometSink
from zengine.telemetry.snapshot import Snapshot
from zengine.telemetry.subject import RunRecord


@pytest.fixture
def calls(monkeypatch):
    calls = []
    experiment = SimpleNamespace(
        set_name=lambda name: calls.append(("name", name)),
        log_parameters=lambda parameters: calls.append(("parameters", parameters)),
        log_metrics=lambda metrics, step: calls.append(("metrics", step, sorted(metrics))),
        end=lambda: calls.append(("end",)),
    )
    module = ModuleType("comet_ml")
    module.start = lambda **options: calls.append(("start", options)) or experiment
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    return calls


def snapshot(step):
    report = StepReport(
        applied=True, reason="", step=step, applied_steps=step, skipped_steps=0, samples=8 * step,
        loss=2.5, grad_norm=1.0, loss_scale=1.0, lr=(0.1,),
    )  # fmt: skip
    return Snapshot(report=report)


def test_a_point_is_sent_when_enough_samples_have_passed(calls):
    sink = CometSink(Comet(enabled=True, project="zoo", api_key="k", experiment_name="n", samples_log_interval=20))
    sink.begin(RunRecord(started="", config={}, plan=[], environment={}, hparams={"lr": 0.1}))
    for step in range(1, 8):
        sink.write(snapshot(step))
    sink.close()
    assert calls[0] == ("start", {"online": True, "api_key": "k", "project": "zoo"})
    assert calls[1:3] == [("name", "n"), ("parameters", {"lr": 0.1})]
    points = [(call[1], call[2][0].split("/")[0]) for call in calls if call[0] == "metrics"]
    assert points == [(8, "Train"), (1, "train"), (32, "Train"), (4, "train"), (56, "Train"), (7, "train")]
    assert calls[-1] == ("end",)


def test_what_is_empty_is_left_to_the_package(calls):
    sink = CometSink(Comet(enabled=True, online=False))
    sink.write_events([("eval/loss", 1.5, 3)])
    assert calls == [("start", {"online": False}), ("metrics", 3, ["eval/loss"])]
