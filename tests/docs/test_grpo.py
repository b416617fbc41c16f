"""The example of GRPO, on two ranks: the reward rises, and its curves are in TensorBoard and on the report page."""

from __future__ import annotations

import importlib.util
import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import repo
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from zcomm.testing import run_ranks
from zengine.reporting import write_report

SCRIPT = repo.ROOT / "examples" / "grpo.py"
CURVES = ("reward", "solved", "kl", "reference_kl", "mean_length")


def run_example(*options: str) -> tuple[list[float], str]:
    """Run the example on each rank; return the solved shares and the output."""
    spec = importlib.util.spec_from_file_location("grpo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    printed = io.StringIO()
    with redirect_stdout(printed):
        solved = module.main(options)
    return solved, printed.getvalue()


def test_it_learns_to_close_brackets_and_draws_its_curves(tmp_path: Path) -> None:
    options = ("--warmup", "150", "--steps", "12", "--output", str(tmp_path))
    (solved, printed), (_, silence) = run_ranks(run_example, 2, *options)
    assert sum(solved[-4:]) / 4 > sum(solved[:4]) / 4 + 0.1
    assert printed.count("reference_kl") == 2
    assert silence == ""
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    points = {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    page = write_report([tmp_path], tmp_path / "page.html").read_text(encoding="utf-8")
    for name in CURVES:
        assert len(points[f"rollout/{name}"]) == 12, name
        assert f"Rollouts: {name.replace('_', ' ')}" in page
    assert all(event.value == 0 for event in events.Scalars("rollout/kl"))  # exact


def test_it_is_short() -> None:
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) < 120
