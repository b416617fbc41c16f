"""The main job under pairs of splits, and resumed from one under another, equals one process.

The tests use warm ranks, a few files of this repository as text, and stop runs at chosen steps; the rest is the code
of `dev.py train`: options, recipe, loop, validation, checkpoints, the sample.

[Note: the bound]  Losses are near 5 and norms near 1 in float32.  Sums in another order differ by an ulp or two per
step, which ten steps of AdamW turn into 1e-6.  1e-5 is allowed; a missing load-balancing loss of one stage would be
5e-3.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import train.main
from train import evaluate
from train.evaluate import Result
from train.inference import Inference
from train.messages import Run, generate_sample
from train.stopping import StopReason
from train.text import read_corpus
from zcomm.testing import run_ranks

TEXT = Path(__file__).parents[2] / "packages" / "zcomm" / "src"
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "train_batch_size": 16,  # windows, on any number of replicas
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}},
}
STEPS, BOUND = 10, 1e-5
Leg = tuple[int, str]  # the step to stop after, options
Cases = dict[str, tuple[Leg, ...]]  # by name of the run


class StopsAfter:
    """Replaces StopVote: stops after step `last`, without signals and communication."""

    last = STEPS

    def __init__(self, *, minutes: float, die_at: int) -> None:
        pass

    def decide(self, step: int, device: object) -> StopReason:
        return StopReason.INTERRUPTED if step == self.last < STEPS else StopReason.NONE


def run(runs: Path, name: str, legs: tuple[Leg, ...]) -> str:
    """Train in several legs; return the sample of text at the end."""
    samples, trained = list[str](), list[Run]()

    def final_result(*given: Any) -> Result:
        """Generate from the model itself, of which a rank may hold a part."""
        samples.append(generate_sample(trained[-1]))
        return evaluate.final_result(*given)

    def write_results(run: Run, result: Result, inference: Inference, rows: object) -> str:
        """Compare the engine for inference, over the whole model of the checkpoint, with the model itself."""
        if not run.recipe.shape.experts:
            assert inference.variants[0].bits_per_byte == pytest.approx(result.model, abs=1e-4)
        return ""

    small = {
        "read_corpus": lambda: read_corpus(TEXT, minimum_bytes=1000),
        "StopVote": StopsAfter,
        "introduction": lambda run: trained.append(run) or "",
        "final_result": final_result,
        "write_results": write_results,
    }
    with mock.patch.multiple(train.main, **small), mock.patch("train.messages.SAMPLE_BYTES", 12):
        for number, (last, options) in enumerate(legs):
            given = (
                ("--resume",) if number else ("--quick", "--steps", f"{STEPS}", "--config", str(runs / "config.json"))
            )
            StopsAfter.last = last
            assert train.main.main([*given, "--runs", str(runs), "--name", name, *options.split()]) == 0
            degrees = trained[-1].engine.plan.parallel.degrees
            for option, value in re.findall(r"--(pipeline|sequence|tensor|expert) (\d)", options):
                assert getattr(degrees, option) == int(value), (name, options)
    return samples[-1]


def runs_of(runs: Path, cases: Cases) -> set[str]:
    """Return the samples of all these runs."""
    return {run(runs, name, legs) for name, legs in cases.items()}


def figures(run: Path) -> list[float]:
    """Return loss and norm of every step, and the validation loss."""
    rows = [json.loads(line) for line in (run / "losses.jsonl").read_text().splitlines()]
    found = [row[key] for row in rows for key in ("loss", "grad_norm", "validation") if key in row]
    assert len(found) == 2 * STEPS + 1
    return found


PLAIN: Cases = {
    "sequences": ((3, "--pipeline 2 --sequence 2"), (6, "--pipeline 1"), (STEPS, "--pipeline 4 --sequence 1")),
    "tensors": ((3, "--stage 1 --tensor 2 --pipeline 2"), (STEPS, "--pipeline 1 --sequence 2")),
    "one at a time": (
        (3, "--ranks 4 --sequence 2"),
        (6, "--sequence 1 --tensor 2"),
        (STEPS, "--tensor 1 --pipeline 2"),
    ),
}
BACK = ((6, "--pipeline 1"), (STEPS, "--tensor 2 --pipeline 2 --expert 1"))
EXPERTS: Cases = {
    "stage 0": ((3, "--stage 0 --pipeline 2 --expert 2"), *BACK),
    "stage 3": ((3, "--stage 3 --pipeline 2 --expert 2"), *BACK),
    "tensors": ((3, "--stage 3 --tensor 2 --pipeline 2 --expert 1"), (STEPS, "--tensor 2 --pipeline 1 --expert 2")),
    "no other": ((3, "--stage 2 --ranks 4 --expert 2"), (STEPS, "--ranks 4 --expert 1")),
}


@pytest.mark.parametrize(("alone", "cases"), [("--ranks 1", PLAIN), ("--ranks 1 --expert 1", EXPERTS)])
def test_pairs_of_splits_train_as_one_process_and_resume_under_others(
    alone: str, cases: Cases, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (expected,) = run_ranks(runs_of, 1, tmp_path, {"alone": ((STEPS, alone),)})
    assert run_ranks(runs_of, 4, tmp_path, cases) == [expected] * 4
    for name in cases:
        assert figures(tmp_path / name) == pytest.approx(figures(tmp_path / "alone"), abs=BOUND), name


def test_stages_with_sequence_and_expert_ranks_train_as_such_ranks_without_stages(tmp_path: Path) -> None:
    """Compared with such ranks, not with one process: each routes its own bytes with its own capacity."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    cases = {
        "pieces": ((STEPS, "--ranks 4 --sequence 2 --expert 1"),),
        "all": ((3, "--ranks 4 --stage 3 --pipeline 2 --sequence 2 --expert 2"), (STEPS, "--ranks 4 --pipeline 1")),
    }
    assert {len(samples) for samples in run_ranks(runs_of, 4, tmp_path, cases)} == {1}
    assert figures(tmp_path / "all") == pytest.approx(figures(tmp_path / "pieces"), abs=BOUND)
