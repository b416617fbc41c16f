"""Weights & Biases, against a stand-in for its package."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from zengine.step_report import StepReport
from zengine.telemetry.sinks.wandb import WandbSink
from zengine.telemetry.snapshot import Snapshot
from zengine.telemetry.subject import RunRecord

RECORD = RunRecord(started="now", config={"train_batch_size": 4}, plan=[], environment={}, hparams={})


@pytest.fixture
def calls(monkeypatch):
    calls = []
    run = SimpleNamespace(
        log=lambda scalars, step: calls.append(("log", step, scalars)),
        finish=lambda: calls.append(("finish",)),
        define_metric=lambda tags, step_metric: calls.append(("axis", tags, step_metric)),
        config=SimpleNamespace(update=lambda config: calls.append(("config", config))),
    )
    module = ModuleType("wandb")
    module.init = lambda **options: calls.append(("init", options)) or run
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def plan(**names):
    return SimpleNamespace(**{"enabled": True, "project": "zoo", "group": "", "team": "", **names})


def test_one_log_call_a_boundary_at_the_number_of_samples(calls):
    report = StepReport(
        applied=True, reason="", step=1, applied_steps=1, skipped_steps=0, samples=32,
        loss=2.5, grad_norm=1.0, loss_scale=1.0, lr=(0.1,),
    )  # fmt: skip
    sink = WandbSink(plan(group="g", team="t"))
    sink.begin(RECORD)
    sink.write(Snapshot(report=report))
    sink.write_events([("eval/loss", 1.5, 32)])
    sink.close()
    assert calls.pop(-2) == ("log", 32, {"eval/loss": 1.5})
    assert calls[0] == ("init", {"project": "zoo", "group": "g", "entity": "t"})
    assert ("axis", "perf/*", "train/global_step") in calls
    assert calls[-3] == ("config", {"train_batch_size": 4})
    assert calls[-2] == ("log", 32, Snapshot(report=report).scalars())
    assert calls[-1] == ("finish",)


def test_empty_names_are_left_to_the_package(calls):
    WandbSink(plan())
    assert calls[0] == ("init", {"project": "zoo", "group": None, "entity": None})
