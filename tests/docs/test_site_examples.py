"""Every file of examples/ runs in seconds on CPUs, on the ranks that it names, and does what its text says."""

from __future__ import annotations

import io
import math
import os
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import repo

from zcomm.testing import end_ranks, run_ranks

EXAMPLES = repo.ROOT / "examples"
MAX_LINES = 120


def run(name: str, *arguments: Any) -> tuple[Any, str]:
    """Run the example's `main` on this rank; return its result and its output."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        result = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](*arguments)
    return result, printed.getvalue()


def on(num_ranks: int, name: str, *arguments: Any) -> list[tuple[Any, str]]:
    return run_ranks(run, num_ranks, name, *arguments)


def in_fresh_rank(name: str) -> tuple[Any, str]:
    """Run an example that configures another library for its whole process."""
    end_ranks()
    [found] = run_ranks(run, 1, name)
    end_ranks()
    return found


def test_examples_are_short_and_begin_with_their_command() -> None:
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) < MAX_LINES, path.name
        assert f"examples/{path.name}" in text.partition('"""')[2].partition('"""')[0], path.name


def test_an_example_that_extends_the_path_finds_its_modules_as_typed(tmp_path: Path) -> None:
    paths = [path for path in EXAMPLES.glob("*.py") if "sys.path" in path.read_text(encoding="utf-8")]
    assert paths
    sources = os.pathsep.join(str(repo.package_folder(name) / "src") for name in repo.PACKAGES)
    for path in paths:
        command = [sys.executable, "-c", "import runpy, sys; runpy.run_path(sys.argv[1])", str(path)]
        environ = {**os.environ, "PYTHONPATH": sources}
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_every_example_has_a_test() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (repo.ROOT / "tests/docs").glob("test_*.py"))
    names = [path.stem for path in EXAMPLES.glob("*.py")]
    assert [name for name in names if f'"{name}"' not in text and f'"{name}.py"' not in text] == []


def test_the_gpt_learns_and_writes() -> None:
    [(loss, printed), (other, silence)] = on(2, "gpt", 20)
    assert loss == other < 0.7 * math.log(256)
    assert "step 20" in printed
    assert "def " in printed
    assert silence == ""


def test_a_run_that_is_stopped_goes_on_and_ends_as_one_that_was_not(tmp_path: Path) -> None:
    code = [sys.executable, str(EXAMPLES / "preemptible.py"), str(tmp_path / "run"), "40", "50"]
    with subprocess.Popen(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as stopped:
        assert stopped.stdout is not None
        assert stopped.stdout.readline() == "starts at step 0\n"
        stopped.terminate()
        assert "saved" in stopped.communicate(timeout=600)[1]
    assert stopped.returncode == 0
    assert not (tmp_path / "run" / "done").exists()
    [((first, loss), printed)] = on(1, "preemptible", str(tmp_path / "run"), 40)
    [((_, whole), _)] = on(1, "preemptible", str(tmp_path / "whole"), 40)
    assert 0 < first < 40
    assert loss == whole
    assert printed.startswith(f"starts at step {first}")


@pytest.mark.parametrize(("code", "done", "again"), [(0, 0, True), (143, 0, True), (0, 1, False), (1, 0, False)])
def test_the_job_script_queues_a_run_again_that_is_not_done(
    code: int, done: int, again: bool, tmp_path: Path
) -> None:
    for name, body in {"srun": f"exit {code}", "scontrol": f"echo $@ > {tmp_path}/asked"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    if done:
        (tmp_path / "done").touch()
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    script = str(EXAMPLES / "cluster" / "train.sbatch")
    assert subprocess.run(["bash", script, str(tmp_path)], env=environ, check=False).returncode == code
    assert (tmp_path / "asked").exists() == again


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_deepspeed_loop_learns_and_restores(num_ranks: int, tmp_path: Path) -> None:
    [(ratio, printed), *_] = on(num_ranks, "from_deepspeed", str(tmp_path))
    assert ratio < 0.05
    assert "after 64 steps; restored from" in printed


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_loop_without_an_engine_equals_a_plain_one(num_ranks: int) -> None:
    [(difference, printed), *_] = on(num_ranks, "from_fsdp2")
    assert difference < 1e-6
    assert "of a plain loop" in printed


def test_the_trainer_of_transformers_learns_to_count() -> None:
    pytest.importorskip("transformers")
    loss, _ = in_fresh_rank("transformers_trainer")
    assert loss < 1.5  # ln 32 = 3.5 knows nothing


def test_the_trainer_of_lightning_learns() -> None:
    pytest.importorskip("lightning")
    ratio, _ = in_fresh_rank("lightning_trainer")
    assert ratio < 0.5


def test_the_classifier_is_right() -> None:
    [(accuracy, printed)] = on(1, "image_classifier")
    assert accuracy > 0.9
    assert "accuracy" in printed


def test_the_generator_finds_the_mean() -> None:
    [(mean, _)] = on(1, "gan")
    assert abs(mean - 3) < 1


def test_a_split_model_has_the_losses_of_a_whole_one() -> None:
    pytest.importorskip("transformers")
    [(whole, printed)] = on(1, "tensor_parallel")
    [(split, split_printed), _] = on(2, "tensor_parallel")
    assert split == pytest.approx(whole, rel=1e-5)
    assert printed.split()[0] != split_printed.split()[0], "a rank holds a part"


def test_a_pipeline_has_the_losses_of_one_stage() -> None:
    [(whole, _)] = on(1, "pipeline")
    [(piped, printed), _] = on(2, "pipeline")
    assert piped == pytest.approx(whole, rel=1e-5)
    assert "rank 1  .  F0 B0" in printed


def test_a_ring_has_the_losses_of_one_rank() -> None:
    [(whole, _)] = on(1, "sequence_parallel")
    [(ring, printed), _] = on(2, "sequence_parallel")
    assert ring == pytest.approx(whole, rel=1e-3)
    assert ring[-1] < 0.5 * ring[0]
    assert "32 tokens of each sample on this rank" in printed


def test_experts_are_distributed_and_learn() -> None:
    [((ratio, own), printed), _] = on(2, "moe")
    assert ratio < 0.5
    assert own == 2
    assert "2 of 4 experts here" in printed


def test_preferences_are_learnt() -> None:
    pytest.importorskip("transformers")
    [(loss, _)] = on(1, "dpo")
    assert loss < 0.3  # ln 2 = 0.69 prefers nothing


def test_the_reward_of_rollouts_grows() -> None:
    pytest.importorskip("transformers")
    [((first, last), _)] = on(1, "rollouts")
    assert last > first + 0.1


def test_states_on_disk_change_no_loss() -> None:
    [((on_disk, in_memory), _)] = on(1, "offload_disk")
    assert on_disk == in_memory
    assert on_disk[-1] < on_disk[0]


def test_a_run_resumes_at_another_stage() -> None:
    [((resumed, whole), _)] = on(1, "resume")
    assert resumed == whole


def test_four_bits_are_loaded_and_generate() -> None:
    pytest.importorskip("transformers")
    [((ratio, error), printed)] = on(1, "int4")
    assert ratio < 0.3
    assert 0 < error < 0.3
    assert "new tokens" in printed


def test_the_plain_loops_learn_and_resume() -> None:
    [((ratio, num_bytes), _)] = on(1, "zoptim_loop")
    assert ratio < 0.2
    assert num_bytes < 3 * 1200
    [(same, _)] = on(1, "zckpt_loop")
    assert same


def test_errors_name_the_parameter_and_the_call() -> None:
    [(said, _)] = on(1, "debugging")
    text = "\n".join(said)
    assert "first.weight" in text or "first.bias" in text
    assert "backward" in said[-2]
    assert "ran out of memory in forward()" in said[-1]


def test_a_plan_shrinks_with_the_stage_and_allocates_nothing() -> None:
    [(found, _)] = on(1, "planning")
    assert found[0] > found[1] > found[2] > found[3]
    assert found[0] > 16e9 * 4
