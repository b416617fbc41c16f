"""Sequence parallelism through zengine: curves equal those of one process, at every stage and accumulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zcomm
import zengine
from zcomm.testing import run_ranks
from zpartition.sequence import Order, SequenceBatches, Split
from zpartition.testing.sequence_models import LENGTH, Reader, causal, mean_over, ring, samples, ulysses

STEPS, CLIP, LR = 4, 0.5, 0.02
STRICT = {"stage3_unit_size": 600, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}


def config(stage: int, accumulation: int, sequence: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "sequence_parallel_size": sequence,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage, **(STRICT if stage == 3 else {})},
    }


def batches(replicas: int, accumulation: int, first: int = 0) -> list[list[list[dict[str, Tensor]]]]:
    """Batches by step, micro-step and replica."""
    count = STEPS * accumulation * replicas
    found = iter(samples((first + 1) * count, seed=5))
    every = [
        [[next(found) for _ in range(replicas)] for _ in range(accumulation)] for _ in range(STEPS * (first + 1))
    ]
    return every[first * STEPS :]


def oracle(replicas: int, accumulation: int, rounds: int = 1) -> list[float]:
    """Return losses and gradient norms of one process on all data."""
    model, whole = Reader(), SequenceBatches([], Split())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    found = []
    for step in [step for index in range(rounds) for step in batches(replicas, accumulation, index)]:
        total = 0.0
        for batch in [batch for micro in step for batch in micro]:
            loss = model(**whole.piece(batch)) / (accumulation * replicas)
            loss.backward()
            total += loss.item()
        found += [total, float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))]
        optimizer.step()
        optimizer.zero_grad()
    return found


def engine_of(stage: int, accumulation: int, sequence: int, kind: str = "ulysses") -> tuple[zengine.Engine, Any]:
    groups = zcomm.Groups.of(zcomm.Degrees(sequence=sequence))
    group = groups.sequence()
    attention = ulysses(group) if kind == "ulysses" else ring(group)
    model = Reader(attention, mean_over(group), num_tiles=2)
    engine = zengine.initialize(model=model, config=config(stage, accumulation, sequence))[0]
    order = Order.CONTIGUOUS if kind == "ulysses" else Order.ZIGZAG
    return engine, SequenceBatches.over([], group, order=order)


def train(
    engine: zengine.Engine, cut: SequenceBatches, sequence: int, accumulation: int, first: int = 0
) -> list[float]:
    replicas, replica = zcomm.group_size() // sequence, zcomm.group_rank() // sequence
    found = []
    for step in batches(replicas, accumulation, first):
        for micro in step:
            loss = engine(**cut.piece(micro[replica]))
            engine.backward(loss)
            report = engine.step()
        found += [report.loss, report.grad_norm]
    return found


def _curves(sequence: int, cases: list[tuple[int, int, str]]) -> dict[str, list[float]]:
    found = {}
    for stage, accumulation, kind in cases:
        engine, cut = engine_of(stage, accumulation, sequence, kind)
        found[f"{stage} {accumulation} {kind}"] = train(engine, cut, sequence, accumulation)
        assert (engine.dp_world_size, engine.sequence_parallel_size) == (zcomm.group_size() // sequence, sequence)
        engine.close()
    return found


TWO = [(stage, accumulation, "ulysses") for stage in range(4) for accumulation in (1, 3)]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, [*TWO, (0, 3, "ring"), (3, 1, "ring")]), (4, [(stage, 2, "ulysses") for stage in range(4)])],
)
def test_curves_are_those_of_one_process(ranks: int, cases: list[tuple[int, int, str]]) -> None:
    expected = {accumulation: oracle(ranks // 2, accumulation) for _, accumulation, _ in cases}
    for found in run_ranks(_curves, ranks, 2, cases):
        for what, curve in found.items():
            assert curve == pytest.approx(expected[int(what.split()[1])], rel=2e-5), what  # float32


def _weighted(size: int) -> list[float]:
    """Train with per-rank means and `weight=`, the number of this rank's tokens, instead of sums over ranks."""
    group = zcomm.Groups.of(zcomm.Degrees(sequence=size)).sequence()
    attention = ulysses(group) if size > 1 else causal
    engine = zengine.initialize(model=Reader(attention), config=config(2 * (size > 1), 3, size))[0]
    cut, found = SequenceBatches.over([], group), []
    for step in batches(1, 3):
        for micro in step:
            piece = cut.piece(micro[0])
            engine.backward(engine(**piece), weight=(piece["shift_labels"] != -100).sum())
            report = engine.step()
        found += [report.loss, report.grad_norm]
    engine.close()
    return found


def test_loss_weights_equal_sums_over_ranks() -> None:
    expected = run_ranks(_weighted, 1, 1)[0]
    for found in run_ranks(_weighted, 2, 2):
        assert found == pytest.approx(expected, rel=2e-5)


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.arange(LENGTH) + index, "labels": torch.arange(LENGTH) + index}


def _loaded() -> list[Any]:
    """Return the samples that the engine's loader yields on two replicas of two ranks."""
    groups = zcomm.Groups.of(zcomm.Degrees(sequence=2))
    engine, _, loader, _ = zengine.initialize(model=Reader(), config=config(1, 1, 2), training_data=Texts())
    found = [piece["input_ids"].tolist() for piece in SequenceBatches.over(loader, groups.sequence())]
    engine.close()
    return found


def test_sequence_ranks_get_parts_of_the_same_samples() -> None:
    ranks = run_ranks(_loaded, 4)
    wholes = [
        [torch.cat([torch.tensor(each) for each in pair], 1) for pair in zip(*ranks[i : i + 2])] for i in (0, 2)
    ]
    seen = sorted(int(row[0]) for replica in wholes for batch in replica for row in batch)
    assert seen == list(range(16))
    for replica in wholes:
        for row in torch.cat(replica):
            assert torch.equal(row, torch.arange(LENGTH) + row[0])


def _saves(root: Path) -> None:
    engine, cut = engine_of(3, 1, 2)
    train(engine, cut, 2, 1)
    engine.save_checkpoint(str(root), "shared")
    engine.close()


def _resumes(root: Path, sequence: int) -> list[float]:
    """Resume with two replicas on equal data, with two sequence ranks, and with one rank."""
    engine, cut = engine_of(1, 1, sequence)
    engine.load_checkpoint(str(root), "shared")
    found = []
    for step in batches(1, 1, 1):
        engine.backward(engine(**cut.piece(step[0][0])))
        report = engine.step()
        found += [report.loss, report.grad_norm]
    engine.close()
    return found


def test_a_checkpoint_resumes_at_any_degree(tmp_path: Path) -> None:
    run_ranks(_saves, 2, tmp_path)
    expected = oracle(1, 1, rounds=2)[2 * STEPS :]
    for ranks, sequence in ((1, 1), (2, 1), (4, 4), (2, 2)):
        for found in run_ranks(_resumes, ranks, tmp_path, sequence):
            assert found == pytest.approx(expected, rel=2e-5), (ranks, sequence)


def _mistaken() -> str:
    with pytest.raises(zengine.ConfigError) as caught:
        zengine.initialize(model=Reader(), config=config(0, 1, 3))
    return str(caught.value)


def test_degrees_that_do_not_divide_raise_with_the_numbers() -> None:
    assert (
        "sequence_parallel_size = 3: one copy of the model takes pipeline 1 x sequence 3 x tensor 1 = 3 ranks"
        in (run_ranks(_mistaken, 2)[0])
    )
