"""Elastic runs at worlds that do not divide the batch: same batches, same losses, same weights as one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zengine
import zpartition
from zcomm.testing import run_ranks
from zengine.data import forever

BATCH, SAMPLES = 8, 30
ELASTIC = {"enabled": True, "max_train_batch_size": BATCH, "micro_batch_sizes": [2], "version": 0.1}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 13), nn.Linear(13, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Numbered(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return x, torch.tensor(index)


def engine_of(stage: int, **more: Any) -> Any:
    config = {
        "elasticity": ELASTIC,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "gradient_clipping": 0.5,
        "dataloader_drop_last": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }
    engine, _, loader, _ = zengine.initialize(model=Net(), config=config, training_data=Numbered())
    return engine, iter(forever(loader))


def tokens(numbers: Tensor) -> Tensor:
    return numbers % 4 + 1


def train(engine: Any, batches: Any, steps: int, *, weighted: bool) -> tuple[list[float], list[list[int]]]:
    """Return the losses, and this rank's samples by micro-step."""
    losses, seen = [], []
    while len(losses) < steps:
        x, numbers = next(batches)
        each = engine(x).square().sum(1)
        if weighted:
            loss = (each * tokens(numbers)).sum() / tokens(numbers).sum()
            engine.backward(loss, weight=float(tokens(numbers).sum()))
        else:
            engine.backward(each.mean())
        seen.append(numbers.tolist())
        report = engine.step()
        if report is not None:
            losses.append(report.loss)
    return losses, seen


def run(stage: int, weighted: bool, elastic: dict[str, Any]) -> tuple[list[float], list[list[int]], Any, int]:
    engine, batches = engine_of(stage, elasticity=elastic)
    losses, seen = train(engine, batches, 7, weighted=weighted)
    weights, samples = zpartition.whole_state_dict(engine.module), engine.global_samples
    engine.close()
    return losses, seen, weights, samples


def order_of(ranks: list[Any], num_steps: int, batch: int) -> list[list[int]]:
    """Return the samples of each step, over micro-steps and ranks in their order."""
    found = [number for micro in zip(*(seen for _, seen, *_ in ranks)) for share in micro for number in share]
    return [found[step * batch : (step + 1) * batch] for step in range(num_steps)]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_three_ranks_train_a_batch_of_eight_as_one_does(stage: int, weighted: bool) -> None:
    alone = run_ranks(run, 1, stage, weighted, ELASTIC)
    three = run_ranks(run, 3, stage, weighted, ELASTIC)
    assert {len(share) for _, seen, *_ in three for share in seen} == {1, 2}
    # one rank has 3 whole steps of 8 in an epoch of 30 and goes on with 3 micro-steps of 2; three ranks end there
    assert order_of(three, 3, BATCH) == order_of(alone, 3, BATCH)
    for losses, _, _, samples in three:
        assert losses[:3] == pytest.approx(alone[0][0][:3], rel=2e-6)
        assert losses == three[0][0]
        assert samples == 7 * BATCH


def matched(stage: int, weighted: bool) -> tuple[list[float], Any]:
    """Train for three steps, which are the same at every world."""
    engine, batches = engine_of(stage)
    losses, _ = train(engine, batches, 3, weighted=weighted)
    weights = zpartition.whole_state_dict(engine.module)
    engine.close()
    return losses, weights


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_are_those_of_one_rank(stage: int, weighted: bool) -> None:
    ((_, expected),) = run_ranks(matched, 1, 0, weighted)
    for _, weights in run_ranks(matched, 3, stage, weighted):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=2e-6)


def test_ranks_without_samples_weigh_nothing() -> None:
    few = {**ELASTIC, "max_train_batch_size": 2, "micro_batch_sizes": [1]}
    for weighted in (False, True):
        alone, three = run_ranks(run, 1, 1, weighted, few), run_ranks(run, 3, 1, weighted, few)
        for losses, _, weights, samples in three:
            assert losses == pytest.approx(alone[0][0], rel=2e-6)
            assert samples == 14
            for name, value in alone[0][2].items():
                torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=2e-6)


def part(folder: str, first: int, last: int) -> tuple[list[float], list[list[int]]]:
    engine, batches = engine_of(2)
    if first:
        engine.load_checkpoint(folder)
    found = train(engine, batches, last - first, weighted=False)
    engine.save_checkpoint(folder)
    engine.close()
    return found


def test_a_run_goes_on_at_other_worlds_with_the_same_samples(tmp_path: Path) -> None:
    seen: list[list[int]] = []
    losses: list[float] = []
    for world, first, last in ((2, 0, 1), (3, 1, 2), (1, 2, 3)):
        ranks = run_ranks(part, world, str(tmp_path), first, last)
        seen += order_of(ranks, last - first, BATCH)
        losses += ranks[0][0]
    alone = run_ranks(run, 1, 2, False, ELASTIC)
    assert seen == order_of(alone, 3, BATCH)
    assert losses == pytest.approx(alone[0][0][:3], rel=2e-6)


def wrong() -> list[str]:
    engine, _ = engine_of(1)
    found = []
    with pytest.raises(ValueError, match=r"share of the batch of 8 samples there has \d: 3 replicas"):
        engine(torch.randn(5, 6))
    with torch.no_grad():
        engine(torch.randn(5, 6))  # evaluation has batches of its own
    with pytest.raises(ValueError, match="shared unevenly by 3 replicas"):
        engine.set_train_batch_size(6)
    with pytest.raises(ValueError, match=r"an IterableDataset yields batches of one size"):
        engine.deepspeed_io(Endless())
    engine.close()
    return found


class Endless(torch.utils.data.IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        while True:
            yield torch.zeros(6)


def test_other_batches_are_refused() -> None:
    run_ranks(wrong, 3)
