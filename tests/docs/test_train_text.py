"""The training loop of the examples, on two ranks, with its metrics in TensorBoard."""

from __future__ import annotations

import importlib.util
import io
import json
import math
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import repo
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from zcomm.testing import run_ranks
from zengine.telemetry.sinks.tensorboard import tag_of

SCRIPT = repo.ROOT / "tests" / "docs" / "train_text.py"
SMALL = ["--layers", "2", "--width", "32", "--heads", "2", "--max_length", "32", "--text_bytes", "20000"]


def run_example(*options: str) -> tuple[int, str]:
    """Run the example on each rank; return the steps and the output."""
    spec = importlib.util.spec_from_file_location("train_text", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    printed = io.StringIO()
    with redirect_stdout(printed):
        steps = module.main([*SMALL, *options])
    return steps, printed.getvalue()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run a benchmark of 9 steps with recomputation; return the folder and rank 0's output."""
    folder = tmp_path_factory.mktemp("example")
    (steps, printed), (other_steps, silence) = run_ranks(
        run_example, 2, "--output", str(folder), "--bench_steps", "9", "--log_interval", "4",
        "--activation_checkpointing",
    )  # fmt: skip
    assert steps == other_steps == 12  # three of them to warm up
    assert silence == ""
    return folder, printed


def test_every_documented_tag_is_in_tensorboard_on_its_axis(run: tuple[Path, str]) -> None:
    events = EventAccumulator(str(run[0] / "tensorboard"), size_guidance={"histograms": 0})
    events.Reload()
    names = {tag_of(name): name for name in events.Tags()["scalars"]}
    points = {tag: [(event.step, event.value) for event in events.Scalars(name)] for tag, name in names.items()}
    steps = list(range(1, 13))
    for tag in ("train/loss", "train/epoch", "train/global_step", "train/learning_rate"):
        assert [step for step, _ in points[tag]] == steps, tag
    for tag in ("perf/step_time_ms", "perf/tokens_per_second", "perf/tflops"):
        assert [step for step, _ in points[tag]] == steps[3:], tag
        assert all(value > 0 for _, value in points[tag]), tag
    for tag in ("train_loss", "lr", "elapsed_time_ms_forward", "elapsed_time_ms_data"):
        assert [step for step, _ in points[f"Train/Samples/{tag}"]] == [16 * step for step in steps], tag
    losses = [value for _, value in points["train/loss"]]
    assert losses[-1] < losses[0] < 1.2 * math.log(256)
    assert [event.step for event in events.Histograms("7 gradients/norm_by_layer")] == [4, 8, 12]


def test_the_speeds_agree_with_each_other_and_with_the_formula(run: tuple[Path, str]) -> None:
    lines = [json.loads(line)["values"] for line in (run[0] / "run" / "events.jsonl").read_text().splitlines()]
    record = json.loads((run[0] / "run" / "run.json").read_text())
    assert record["config"]["bench_steps"] == 9
    layers, width, length = 2, 32, 32
    block = 3 * width * width + 3 * width + width * width + width + 8 * width * width + 5 * width + 4 * width
    num_parameters = (2 * 256 + length + 2) * width + layers * block
    per_sample = 2 * 4 * num_parameters * length + 4 * 4 * layers * width * length**2
    for values in lines[3:]:
        seconds = values["perf/step_time_ms"] / 1e3
        assert values["perf/tokens_per_second"] * seconds == pytest.approx(16 * length)
        assert values["perf/tflops"] * 1e12 * 2 * seconds == pytest.approx(16 * per_sample)  # on two ranks


def test_the_console_has_lines_and_the_figures_of_the_bench(run: tuple[Path, str]) -> None:
    lines = run[1].splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("step ")] == ["step 4", "step 8", "step 12"]
    assert "bench: steps 4 to 12, 2 rank(s)" in lines
    table = [line.strip() for line in lines]
    for row in ("ms a step, median", "tokens/s", "TFLOPS of a device, by the formula", "states, MiB"):
        assert any(line.startswith(row) for line in table), row
