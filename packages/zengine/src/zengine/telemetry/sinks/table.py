"""Table of sinks: one row for each config section that opens one.

A new sink costs three files: its module in this folder, its row in `SINKS`, and its section in
`zengine/config/keys/telemetry.py`.  The row decides which package the section needs, how the sink is opened and
how warnings name it.

Services are reached through their own packages, in adapters of a few lines, which change when the services do.  Files
are written here: CSV and JSON lines by the standard library, TensorBoard's events by records.py, as its package takes
0.4 ms a step; its protocol buffers are the package's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from zengine.telemetry.sinks.aim import AimSink
from zengine.telemetry.sinks.base import MissingPackageError, Sink, Sinks, is_installed
from zengine.telemetry.sinks.comet import CometSink
from zengine.telemetry.sinks.csv import CsvSink
from zengine.telemetry.sinks.jsonl import JsonlSink
from zengine.telemetry.sinks.mlflow import MlflowSink
from zengine.telemetry.sinks.tensorboard import TensorBoardSink
from zengine.telemetry.sinks.trackio import TrackioSink
from zengine.telemetry.sinks.wandb import WandbSink

if TYPE_CHECKING:
    from zengine.config.plan.telemetry import TelemetryPlan

__all__ = ["SINKS", "Package", "SinkRow", "folder_of", "open_sinks", "require_packages"]


@attrs.frozen
class Package:
    """Optional dependency of a sink."""

    module: str  # imported as
    for_pip: str  # installed as
    purpose: str  # completes "it ..." in the error


@attrs.frozen
class SinkRow:
    """One sink.  `title` and `open` receive the plan of its section."""

    section: str  # of the config; attribute of `TelemetryPlan`
    title: Callable[[Any], str]  # sink and destination, for warnings
    open: Callable[[Any, Collection[str]], Sink]  # also receives the charts that stay empty in this run
    requires: tuple[Package, ...] = ()


def folder_of(section: Any) -> Path:
    """Return output_path / job_name of a section; both empty: the working directory."""
    folder = Path(section.output_path or ".").expanduser()
    return folder.joinpath(section.job_name)


SINKS = (
    SinkRow(
        "tensorboard",
        lambda section: f"TensorBoard events in {folder_of(section)}",
        lambda section, empty_charts: TensorBoardSink(folder_of(section), empty_charts),
        (Package("tensorboard", "tensorboard", "writes TensorBoard events"),),
    ),
    SinkRow(
        "csv_monitor",
        lambda section: f"CSV files in {folder_of(section)}",
        lambda section, _: CsvSink(folder_of(section)),
    ),
    SinkRow(
        "jsonl_monitor",
        lambda section: f"run.json and events.jsonl in {folder_of(section)}",
        lambda section, _: JsonlSink(folder_of(section)),
    ),
    SinkRow(
        "wandb",
        lambda section: f"Weights & Biases project {section.project!r}",
        lambda section, _: WandbSink(section),
        (Package("wandb", "wandb", "sends metrics to Weights & Biases"),),
    ),
    SinkRow(
        "comet",
        lambda section: f"Comet project {section.project!r}",
        lambda section, _: CometSink(section),
        (Package("comet_ml", "comet-ml", "sends metrics to Comet"),),
    ),
    SinkRow(
        "mlflow",
        lambda section: f"MLflow experiment {section.experiment!r}",
        lambda section, _: MlflowSink(section),
        (Package("mlflow", "mlflow", "logs to MLflow"),),
    ),
    SinkRow(
        "aim",
        lambda section: f"Aim experiment {section.experiment!r}",
        lambda section, _: AimSink(section),
        (Package("aim", "aim", "logs to Aim"),),
    ),
    SinkRow(
        "trackio",
        lambda section: f"trackio project {section.project!r}",
        lambda section, _: TrackioSink(section),
        (Package("trackio", "trackio", "logs to trackio"),),
    ),
)


def require_packages(plan: TelemetryPlan, rows: Sequence[SinkRow] = SINKS) -> None:
    """Raise MissingPackageError if an enabled section needs a package that is not installed."""
    for row in _enabled(plan, rows):
        for package in row.requires:
            if not is_installed(package.module):
                raise MissingPackageError(
                    f'config section "{row.section}" is enabled; it {package.purpose} and needs the package '
                    f"{package.module!r}, which is not installed in {sys.executable}: install it "
                    f"(pip install {package.for_pip}), or set {row.section}.enabled to false",
                    name=package.module,
                )


def open_sinks(plan: TelemetryPlan, empty_charts: Collection[str] = (), rows: Sequence[SinkRow] = SINKS) -> Sinks:
    """Open the sinks of the enabled sections; a sink that fails to open is logged and left out."""
    sinks = Sinks()
    for row in _enabled(plan, rows):
        section = getattr(plan, row.section)
        sinks.add(row.title(section), lambda row=row, section=section: row.open(section, empty_charts))  # type: ignore[misc]
    return sinks


def _enabled(plan: TelemetryPlan, rows: Sequence[SinkRow]) -> list[SinkRow]:
    return [row for row in rows if getattr(plan, row.section).enabled]
