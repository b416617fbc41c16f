"""The search of `deepspeed --autotuning`: few runs, the best config, and the files that users expect."""

from __future__ import annotations

import json
import os
import random
import shlex
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zengine.deepspeed.autotuning.autotuner import Autotuner, search_all, search_fast
from zengine.deepspeed.autotuning.candidates import Candidate

SIZES = (1, 2, 4, 8, 16)


def candidate(stage: int, size: int, sent: int) -> Candidate:
    return Candidate(stage=stage, micro_batch=size, accumulation=1, replicas=2, others={}, step_bytes=sent)


def grid(sent: tuple[int, ...]) -> list[Candidate]:
    found = [candidate(stage, size, sent[stage]) for stage in range(4) for size in SIZES]
    return sorted(found, key=lambda each: (each.sample_bytes, -each.stage))


def searched(candidates: list[Candidate], figure: Callable[[Candidate], float | None], trials: int = 50) -> Any:
    runs: list[tuple[float | None, str]] = []

    def measure(each: Candidate) -> float | None:
        runs.append((figure(each), each.name))
        return runs[-1][0]

    search_fast(candidates, measure, trials)
    return runs


def test_a_fifth_of_the_runs_finds_the_best_within_five_percent() -> None:
    """Steps that cost their bytes, a fixed part and the samples, with 2% of noise."""
    rng = random.Random(1)
    for _ in range(100):
        sent = (100, 100, 100, 100 + rng.randrange(100))
        costs = rng.uniform(0, 5), rng.uniform(0, 0.05), rng.uniform(0.5, 2)

        def throughput(each: Candidate, costs: tuple[float, float, float] = costs) -> float:
            fixed, wire, sample = costs
            seconds = fixed + wire * each.step_bytes + sample * each.micro_batch
            return each.micro_batch / seconds * rng.uniform(0.99, 1.01)

        candidates = grid(sent)
        runs = searched(candidates, throughput)
        best = max(throughput(each) for each in candidates)
        assert len(runs) <= len(candidates) / 5
        assert max(value for value, _ in runs) >= 0.95 * best


def test_smaller_micro_batches_are_tried_while_they_are_better_and_one_run_is_for_another_stage() -> None:
    peak = {16: 1.0, 8: 2.0, 4: 3.0, 2: 2.5, 1: 1.0}
    runs = searched(grid((100, 100, 120, 200)), lambda each: peak[each.micro_batch] + (each.stage == 0))
    assert [name for _, name in runs] == ["z1_gas1_tmbspg16", "z1_gas1_tmbspg8", "z1_gas1_tmbspg4", "z0_gas1_tmbspg4"]


def test_failed_runs_are_passed_over_and_the_number_of_runs_is_bounded() -> None:
    candidates = grid((100, 100, 120, 200))
    runs = searched(candidates, lambda each: None if each.micro_batch > 8 else 1.0)
    assert [name for _, name in runs][:2] == ["z1_gas1_tmbspg16", "z1_gas1_tmbspg8"]
    assert len(searched(candidates, lambda each: 1.0, trials=1)) == 1
    assert searched([], lambda each: 1.0) == []
    assert len(searched([candidate(2, 4, 1)], lambda each: 1.0)) == 1


def test_all_candidates_run_until_none_was_better_for_long() -> None:
    values: list[float | None] = [1.0, None, 3.0, 2.0, 2.0, 9.0]
    candidates = [candidate(0, index + 1, 0) for index in range(6)]

    def runs(num_trials: int, early_stopping: int) -> int:
        seen: list[int] = []

        def measure(each: Candidate) -> float | None:
            seen.append(each.micro_batch)
            return values[each.micro_batch - 1]

        search_all(candidates, measure, num_trials, early_stopping)
        return len(seen)

    assert (runs(50, 0), runs(50, 2), runs(50, 3), runs(4, 0)) == (6, 5, 6, 4)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


SCRIPT = """
import argparse, torch
from torch import nn
import zengine.deepspeed as deepspeed
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--steps", type=int, default=3)
given = deepspeed.add_config_arguments(parser).parse_args()
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
engine, *_ = deepspeed.initialize(args=given, model=model)
for _ in range(given.steps):
    engine.backward(engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 8)).square().mean())
    engine.step()
if engine.global_rank == 0:
    print("trained", engine.global_steps, engine.train_micro_batch_size_per_gpu())
"""


def test_the_command_tunes_and_then_trains_with_the_best_config(tmp_path: Path) -> None:
    script, config = tmp_path / "train.py", tmp_path / "ds.json"
    script.write_text(SCRIPT)
    section = {
        "enabled": True,
        "start_profile_step": 1,
        "end_profile_step": 2,
        "results_dir": "results",
        "num_trials": 1,
    }
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    config.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": [2, 4],
                "optimizer": optimizer,
                "zero_optimization": {"stage": 0},
                "autotuning": {**section, "results_dir": "results"},
            }
        )
    )
    options = ["--num_gpus", "1", "--master_port", str(free_port()), "--autotuning", "run"]
    command = [sys.executable, "-m", "zengine.deepspeed.launcher.runner", *options, str(script)]
    done = subprocess.run(
        [*command, "--steps", "5", "--deepspeed_config", str(config)],
        cwd=tmp_path,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    best = json.loads((tmp_path / "results" / "ds_config_optimal.json").read_text())
    micro = best["train_micro_batch_size_per_gpu"]
    assert best == {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": 1,
        "train_batch_size": micro,
        "optimizer": optimizer,
        "zero_optimization": best["zero_optimization"],
    }
    assert f"trained 5 {micro}" in done.stdout
    summary = (tmp_path / "results" / "summary.txt").read_text()
    assert "best_exp_name" in summary
    assert "runs of " in summary
    assert summary.strip() in done.stdout
    line = shlex.split((tmp_path / "results" / "cmd_optimal.txt").read_text())
    assert str(script) in line
    assert (tmp_path / "autotuning_exps" / "profile_model_info.json").exists()


def tuner(folder: Path, text: str, *options: str) -> Autotuner:
    (folder / "ds.json").write_text(text)
    args = Namespace(
        user_args=list(options), num_nodes=-1, num_gpus=-1, hostfile="", user_script="x.py", master_port=1
    )
    return Autotuner(args, {"localhost": [0, 1]})


def test_a_wrong_start_is_an_error_and_earlier_runs_alone_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="pass --deepspeed_config FILE"):
        tuner(tmp_path, "{}", "--lr", "1")
    with pytest.raises(ValueError, match=r'autotuning\.tuner_type = "best"'):
        tuner(tmp_path, '{"autotuning": {"tuner_type": "best"}}', "--deepspeed_config", "ds.json")
    with pytest.raises(ValueError, match=r"autotuning = \[\d\]: write an object"):
        tuner(tmp_path, '{"autotuning": [1]}', "--deepspeed", "ds.json")
    ran, kept = tmp_path / "autotuning_results" / "z1", tmp_path / "autotuning_results" / "notes"
    for folder in (ran, kept):
        folder.mkdir(parents=True)
        (folder / "file").write_text("")
    (ran / "exp.json").write_text("{}")
    tuner(tmp_path, '{"autotuning": {"overwrite": false}}', "--deepspeed_config", "ds.json")
    assert ran.exists()
    found = tuner(tmp_path, "{}", "--deepspeed_config", "ds.json")
    assert (ran.exists(), kept.exists()) == (False, True)
    assert (found.exp_num_gpus, found.metric(), found.fast_enabled()) == (2, "throughput", True)


def test_records_rank_by_their_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    found = tuner(tmp_path, '{"autotuning": {"metric": "latency"}}', "--deepspeed_config", "ds.json")
    found.print_tuning_results()
    assert "No run succeeded" in capsys.readouterr().out
    found.write_optimal_config()
    assert found.run_after_tuning() == 1
    found.records = {
        "z1": [({"name": "a"}, 3.0, 1), ({"name": "b"}, 2.0, 1), ({"name": "c"}, None, 1)],
        "z2": [({"name": "d"}, 4.0, 1)],
        "z3": [({"name": "e"}, None, 1)],
    }
    best = found.get_best_space_records()
    assert {space: (exp["name"], value, count) for space, (exp, value, count) in best.items()} == {
        "z1": ("b", 2.0, 3),
        "z2": ("d", 4.0, 1),
        "global": ("b", 2.0, 3),
    }


def test_a_search_without_candidates_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    found = tuner(tmp_path, "{}", "--deepspeed_config", "ds.json")
    found.model_info = {"num_params": 1}
    found.print_tuning_results()
    assert "No config was run: none fits" in capsys.readouterr().out


@pytest.mark.parametrize(("optimizer", "stage"), [("AdamW", 3), ("OneBitAdam", 1), ("ZeroOneAdam", 0), ("None", 3)])
def test_the_model_is_profiled_at_the_highest_stage_that_works(
    optimizer: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = json.dumps({"optimizer": {"type": optimizer}, "train_batch_size": 6, "zero_optimization": {"stage": [0]}})
    config = tuner(tmp_path, text, "--deepspeed_config", "ds.json")._profile_config()
    assert config["zero_optimization"] == {"stage": stage}
    assert "train_batch_size" not in config
