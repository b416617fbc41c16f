"""Runs that left TensorBoard's event files."""

from __future__ import annotations

from pathlib import Path

import pytest

from zengine.reporting.runs import read_event_files, read_run

LOSS, OLD = "train/loss", "Train/Samples/train_loss"


def write(folder: Path, points: dict[str, list[tuple[int, float]]]) -> Path:
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(folder))
    for tag, series in points.items():
        for x, value in series:
            writer.add_scalar(tag, value, x, walltime=1000.0 + x)
    writer.close()
    return folder


def test_steps_and_samples_of_a_boundary_come_together(tmp_path: Path) -> None:
    lines = read_event_files(write(tmp_path, {LOSS: [(1, 3.0), (2, 2.0)], OLD: [(8, 3.0), (16, 2.0)]}))
    assert lines == [
        {"step": 1, "samples": 8, "time_s": 7.0, "values": {LOSS: 3.0, OLD: 3.0}},
        {"step": 2, "samples": 16, "time_s": 15.0, "values": {LOSS: 2.0, OLD: 2.0}},
    ]


def test_either_family_alone_is_enough(tmp_path: Path) -> None:
    old = read_event_files(write(tmp_path / "old", {OLD: [(8, 3.0), (16, 2.0)]}))
    assert [(line["step"], line["samples"]) for line in old] == [(1, 8), (2, 16)]
    new = read_event_files(write(tmp_path / "new", {LOSS: [(5, 3.0), (9, 2.0)], OLD: [(8, 3.0)]}))
    assert [(line["step"], line["samples"], line["values"]) for line in new] == [
        (5, 0, {LOSS: 3.0}),
        (9, 0, {LOSS: 2.0}),
    ]


def test_a_folder_of_event_files_is_a_run(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, {OLD: [(8, 3.0), (16, 2.0)]}))
    assert run.points(OLD) == [(1, 3.0), (2, 2.0)]
    assert "TensorBoard" in run.remarks[0]
