"""The main job end to end: real processes, real text, a tiny model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "tools" / "train" / "launch.py"
QUICK = ("--quick", "--steps", "16", "--threads", "1")  # saves after steps 10 and 16
LIMIT_S = 300


def start(runs: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(LAUNCH), "--runs", str(runs), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(started: subprocess.Popen[str]) -> tuple[int, str]:
    """Return exit code and output; on a time-out terminate the launcher, so that no rank outlives the test."""
    try:
        output, _ = started.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        started.terminate()
        output, _ = started.communicate()
        pytest.fail(f"did not end within {LIMIT_S} s:\n{output}")
    return started.returncode, output


def train(runs: Path, *arguments: str) -> tuple[int, str]:
    return finish(start(runs, *arguments))


def rows_of(run: Path) -> list[dict]:
    path = run / "losses.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def figures(run: Path) -> list[tuple]:
    """Return the reproducible values: step, loss, gradient norm, learning rate, validation loss."""
    keys = ("step", "loss", "grad_norm", "lr", "validation")
    return [tuple(row.get(key) for key in keys) for row in rows_of(run)]


def wait_for(condition, started: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert started is None or started.poll() is None, finish(started)
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)


def test_one_rank_trains_and_writes_all_outputs(tmp_path):
    code, output = train(tmp_path, *QUICK, "--ranks", "1", "--name", "one")
    run = tmp_path / "one"
    assert code == 0, output
    losses = [row["loss"] for row in rows_of(run) if "loss" in row]
    assert len(losses) == 16
    assert losses[-1] < losses[0] - 0.3
    assert {row["step"] for row in rows_of(run) if "validation" in row} == {10}
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    report = (run / "report.html").read_text()
    assert "Where a step&#x27;s time goes" in report
    result = json.loads((run / "result.json").read_text())
    assert result["bigram"] < result["unigram"] < 8
    last_lines = output.splitlines()[-3:]
    for line, place in zip(last_lines, ("checkpoints", f"--logdir {tmp_path}", "report.html")):
        assert place in line
    assert "bits/byte" in output
    starts = next(line for line in output.splitlines() if "bf16 is not faster on this cpu" not in line)
    assert starts.startswith("run one starts"), output  # no other notice before: not on our own config
    assert "step 16/16" in output


def without_measuring(folder: Path) -> Path:
    """Write the default config without measured precision: two measurements on a busy machine may disagree."""
    config = json.loads((LAUNCH.parent / "config.json").read_text())
    config["bf16"]["enabled"] = False
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[tuple]:
    """Figures of a run on two ranks that nothing interrupts."""
    runs = tmp_path_factory.mktemp("whole")
    config = str(without_measuring(runs))
    code, output = train(runs, *QUICK, "--ranks", "2", "--config", config, "--name", "whole")
    assert code == 0, output
    return figures(runs / "whole")


def test_a_killed_run_continues_bit_for_bit(tmp_path, whole):
    same = (*QUICK, "--ranks", "2", "--config", str(without_measuring(tmp_path)))
    code, output = train(tmp_path, *same, "--name", "killed", "--die-at", "13")
    assert code == 128 + signal.SIGKILL, output
    before = figures(tmp_path / "killed")
    assert before[-1][0] == 13
    assert not (tmp_path / "killed" / "report.html").exists()

    code, output = train(tmp_path, "--quick", "--threads", "1", "--ranks", "2", "--resume")
    assert code == 0, output
    assert "run killed resumes after step 10" in output
    assert figures(tmp_path / "killed") == whole
    assert before == whole[: len(before)]


def test_a_run_resumes_under_another_split(tmp_path, whole):
    same = (*QUICK, "--config", str(without_measuring(tmp_path)))
    code, output = train(tmp_path, *same, "--pipeline", "2", "--name", "split", "--die-at", "13")
    assert code == 128 + signal.SIGKILL, output
    assert "a model over 2 ranks; a step is 1 replica x 4 micro-steps x 4 windows" in output

    others = ("--pipeline", "1", "--tensor", "2")
    code, output = train(tmp_path, "--quick", "--threads", "1", "--ranks", "2", "--resume", *others)
    assert code == 0, output
    assert "run split resumes after step 10" in output
    assert "a model over 2 ranks; a step is 1 replica x 4 micro-steps x 4 windows" in output
    for alone, shared in zip(whole, figures(tmp_path / "split"), strict=True):
        assert shared == pytest.approx(alone, abs=2e-4)  # the same windows, in float32, 16 steps of AdamW


def test_a_run_resumes_with_other_expert_ranks(tmp_path):
    """For the losses see test_splits.py."""
    same = (*QUICK, "--config", str(without_measuring(tmp_path)))
    code, output = train(tmp_path, *same, "--pipeline", "2", "--expert", "2", "--name", "split", "--die-at", "13")
    assert code == 128 + signal.SIGKILL, output
    assert "a model over 2 ranks, 4 experts a block over 2 ranks; a step is 2 replicas x 4 micro-steps" in output

    others = ("--pipeline", "1", "--expert", "1")
    code, output = train(tmp_path, "--quick", "--threads", "1", "--ranks", "2", "--resume", *others)
    assert code == 0, output
    assert "run split resumes after step 10" in output
    assert "4 experts a block over 1 rank;" in output
    assert [row["step"] for row in rows_of(tmp_path / "split") if "loss" in row] == list(range(1, 17))


def test_an_interrupted_run_saves_and_prints_the_resume_command(tmp_path):
    started = start(tmp_path, "--quick", "--steps", "1000000", "--threads", "1", "--ranks", "2", "--name", "endless")
    run = tmp_path / "endless"
    wait_for(lambda: len(rows_of(run)) >= 3, started)
    started.send_signal(signal.SIGINT)
    code, output = finish(started)
    assert code == 128 + signal.SIGINT, output
    step = rows_of(run)[-1]["step"]
    assert f"stopped and saved after step {step}" in output
    assert "train --resume --name endless" in output
    assert (run / "checkpoints" / "latest").read_text().strip().endswith(str(step))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_no_rank_outlives_its_launcher(tmp_path):
    started = start(tmp_path, "--quick", "--steps", "1000000", "--threads", "1", "--ranks", "2", "--name", "orphaned")
    run = tmp_path / "orphaned"
    wait_for(lambda: len(rows_of(run)) >= 3, started)
    ranks = children(started.pid)
    started.kill()
    started.wait()
    wait_for(lambda: not any(map(is_alive, ranks)))
    started.stdout.close()
    assert len(ranks) == 2


def state_and_parent(pid: str) -> list[str]:
    """Return state and parent of a process, from /proc; ["Z", "0"] if it has ended."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(") ")[2].split()[:2]
    except OSError:
        return ["Z", "0"]


def children(pid: int) -> list[str]:
    everyone = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [each for each in everyone if state_and_parent(each)[1] == str(pid)]


def is_alive(pid: str) -> bool:
    return state_and_parent(pid)[0] != "Z"


def test_a_usage_error_is_one_line_and_exit_code_2(tmp_path):
    code, output = train(tmp_path, "--resume")
    assert code == 2
    assert output.splitlines() == [f"train: nothing to resume: no run in {tmp_path} has a checkpoint yet"]


def test_a_misspelt_config_key_is_named_without_a_stack(tmp_path):
    config = tmp_path / "mine.json"
    config.write_text('{"train_micro_batch_size_per_gpu": 4, "gradient_cliping": 1.0}')
    code, output = train(tmp_path, "--config", str(config), "--steps", "1", "--ranks", "1")
    assert code == 2
    assert "gradient_clipping" in output
    assert "Traceback" not in output
