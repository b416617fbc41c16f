"""The table of sinks: required packages and folders of config sections."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from zengine.telemetry.sinks.base import MissingPackageError
from zengine.telemetry.sinks.table import SINKS, folder_of, require_packages


def plan(*enabled):
    return SimpleNamespace(
        **{name: SimpleNamespace(enabled=name in enabled) for name in (row.section for row in SINKS)}
    )


@pytest.mark.parametrize(
    ("section", "package", "for_pip", "purpose"),
    [
        ("wandb", "wandb", "wandb", "Weights & Biases"),
        ("tensorboard", "tensorboard", "tensorboard", "TensorBoard events"),
        ("comet", "comet_ml", "comet-ml", "Comet"),
        ("mlflow", "mlflow", "mlflow", "MLflow"),
        ("aim", "aim", "aim", "Aim"),
        ("trackio", "trackio", "trackio", "trackio"),
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
