"""Ray Train runs our loop: two workers give the losses of two plain ranks, also if one dies on the way.

The plain ranks always run; the workers need the released `ray[train]`.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import repo

from zcomm.testing import run_ranks

SCRIPT = repo.ROOT / "examples" / "ray_train.py"


def plain(folder: str, resume: str = "") -> tuple[float, list[int]]:
    """Run the loop without Ray on this rank; return the last loss and the reported epochs."""
    reported: list[int] = []
    loss = runpy.run_path(str(SCRIPT))["train"](folder, resume, lambda loss, epochs: reported.append(epochs))
    return loss, reported


def test_the_loop_needs_no_ray(tmp_path: Path) -> None:
    (first, second) = run_ranks(plain, 2, str(tmp_path))
    assert first == second
    assert first[0] < 1.0
    assert first[1] == [1, 2, 3, 4]
    (again, _) = run_ranks(plain, 2, str(tmp_path), str(tmp_path))
    assert again[1] == []  # nothing is left to do


@pytest.fixture
def example() -> Iterator[dict[str, Any]]:
    ray = pytest.importorskip("ray", reason="ray[train] is not installed")
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": variables})
    yield runpy.run_path(str(SCRIPT))
    ray.shutdown()


def test_workers_of_ray_train_the_same_and_go_on_after_one_has_died(example: dict[str, Any], tmp_path: Path) -> None:
    [(loss, _), _] = run_ranks(plain, 2, str(tmp_path / "plain"))
    metrics = example["main"](str(tmp_path / "ray"), die_at=3)
    assert metrics["epochs"] == 4
    assert metrics["resumed"]
    assert metrics["loss"] == loss
    stored = sorted((tmp_path / "ray" / "ray" / "run").glob("checkpoint_2*"))
    assert len(stored) == 2
    assert all(any(folder.glob("global_step*/manifest.json")) for folder in stored)
