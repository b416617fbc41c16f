"""Sinks may fail, training may not."""

import logging
import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest

from zengine.telemetry.sinks.base import MissingPackageError, Sink, Sinks, folder_of, require_packages


class Recorder:
    def __init__(self, fail_at=()):
        self.fail_at = fail_at
        self.calls = []

    def begin(self, record):
        self.calls.append(record)

    def write(self, snapshot):
        self.calls.append(snapshot)
        if snapshot in self.fail_at:
            raise OSError(28, "No space left on device")

    def close(self):
        self.calls.append("close")


def test_a_failing_sink_is_named_once_with_place_and_cause_and_the_others_go_on(caplog):
    bad, good = Recorder(fail_at=(2, 3)), Recorder()
    sinks = Sinks()
    sinks.add("CSV files in runs/a", lambda: bad)
    sinks.add("console", lambda: good)
    sinks.begin("record")
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        for step in (1, 2, 3):
            sinks.write(step)
        sinks.close()
    (record,) = caplog.records
    assert record.name == "zengine.telemetry"
    assert "CSV files in runs/a" in record.getMessage()
    assert "OSError: [Errno 28] No space left on device" in record.getMessage()
    assert "training goes on" in record.getMessage()
    assert bad.calls == ["record", 1, 2]
    assert good.calls == ["record", 1, 2, 3, "close"]


def test_a_sink_that_cannot_be_opened_is_named_and_left_out(caplog):
    def refuse():
        raise PermissionError("read-only file system")

    sinks = Sinks()
    sinks.add("TensorBoard events in /runs", refuse)
    assert not sinks
    assert "TensorBoard events in /runs" in caplog.text
    assert "PermissionError: read-only file system" in caplog.text


def test_an_interrupt_is_not_swallowed():
    class Interrupted(Recorder):
        def write(self, snapshot):
            raise KeyboardInterrupt

    sinks = Sinks()
    sinks.add("x", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        sinks.write(1)


def test_the_base_of_all_sinks_is_the_identity():
    sink, sinks = Sink(), Sinks()
    sinks.add("nothing", lambda: sink)
    sinks.begin(None)
    sinks.write(None)
    sinks.write_events([("a", 1.0, 1)])
    assert sinks
    sinks.close()


def test_closing_twice_closes_once():
    sink, sinks = Recorder(), Sinks()
    sinks.add("x", lambda: sink)
    sinks.close()
    sinks.close()
    assert sink.calls == ["close"]


def plan(*enabled):
    return SimpleNamespace(
        **{
            name: SimpleNamespace(enabled=name in enabled)
            for name in ("tensorboard", "csv_monitor", "wandb", "comet")
        }
    )


@pytest.mark.parametrize(
    ("section", "package", "for_pip", "purpose"),
    [
        ("wandb", "wandb", "wandb", "Weights & Biases"),
        ("tensorboard", "tensorboard", "tensorboard", "TensorBoard events"),
        ("comet", "comet_ml", "comet-ml", "Comet"),
    ],
)
def test_a_missing_package_is_an_error_that_says_what_for_and_how_to_get_it(
    monkeypatch, section, package, for_pip, purpose
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingPackageError,
        match=rf'section "{section}" is enabled.*{purpose}.*pip install {for_pip}.*{section}.enabled',
    ) as caught:
        require_packages(plan(section))
    assert isinstance(caught.value, ImportError)
    require_packages(plan("csv_monitor"))


def test_a_folder_of_the_same_name_is_not_the_package(monkeypatch, tmp_path):
    (tmp_path / "wandb" / "run-1").mkdir(parents=True)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(MissingPackageError):
        require_packages(plan("wandb"))


def test_an_installed_package_is_found(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    require_packages(plan("wandb", "tensorboard"))


@pytest.mark.parametrize(
    ("output_path", "job_name", "folder"),
    [("", "", "."), ("", "job", "job"), ("runs", "", "runs"), ("runs", "a", "runs/a")],
)
def test_events_go_to_the_job_below_the_output_path(output_path, job_name, folder):
    assert str(folder_of(SimpleNamespace(output_path=output_path, job_name=job_name))) == folder
