"""Pipelines of 2 and 4 stages, with and without replicas, at every ZeRO stage: curves equal those of one process.

Losses, gradient norms and the result of eval_batch differ from a plain loop's by rounding only: float32 sums in
another order, 1e-5 of values of a few units.  Without tied weights and clipping no sum has another order, and weights
are equal bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_model import data, layers, loss_of, mine, pipelined
from torch import nn

import zcomm
from zcomm.testing import run_ranks
from zpartition.pipeline import PipelineError, PipelineModule

STEPS = 3
BOUND = 1e-5


def train(num_stages: int, stages: tuple[int, ...], count: int, options: dict[str, Any]) -> dict[int, list[float]]:
    """Return loss and norm of each step, and the loss of an evaluation, by ZeRO stage."""
    found: dict[int, list[float]] = {}
    for stage in stages:
        with pipelined(num_stages, stage, count, **options) as engine:
            numbers: list[float] = []
            for step in range(STEPS):
                loss = engine.train_batch(iter(mine(step, count, engine)))
                report = engine.last_report
                assert report is not None
                assert loss.item() == pytest.approx(report.loss)
                numbers += [report.loss, report.grad_norm]
            found[stage] = [*numbers, engine.eval_batch(iter(mine(99, count, engine))).item()]
    return found


def alone(count: int, clip: float = 0.5) -> list[float]:
    """Train with a plain loop in one process."""
    torch.manual_seed(0)
    model = PipelineModule(layers(tied=True), num_stages=1, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    found = []
    for step in range(STEPS):
        losses = [loss_of(model(x), y) / count for x, y in data(step, count)]
        for loss in losses:
            loss.backward()
        found += [sum(losses).item(), nn.utils.clip_grad_norm_(model.parameters(), clip).item()]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return [*found, sum(loss_of(model(x), y).item() for x, y in data(99, count)) / count]


@pytest.mark.parametrize(
    ("world", "num_stages", "count", "options"),
    [
        (2, 2, 1, {}),
        (2, 2, 2, {}),
        (2, 2, 4, {"pipeline": {"schedule": "zero_bubble", "activation_checkpoint_interval": 2}}),
        (4, 2, 4, {}),
        (4, 2, 8, {"pipeline": {"schedule": "gpipe"}}),
        (4, 4, 4, {}),
        (2, 2, 4, {"pipeline": {"schedule": "zero_bubble"}, "activation_checkpointing": {"modules": ["blocks.*"]}}),
    ],
)
def test_curves_are_those_of_one_process(world: int, num_stages: int, count: int, options: dict[str, Any]) -> None:
    expected = alone(count)
    for found in run_ranks(train, world, num_stages, (0, 1, 2, 3), count, options):
        for stage, numbers in found.items():
            assert numbers == pytest.approx(expected, rel=BOUND, abs=BOUND), f"stage {stage}"


def weights(num_stages: int, stage: int) -> dict[str, torch.Tensor]:
    with pipelined(num_stages, stage, 4, tied=False, gradient_clipping=0.0) as engine:
        for step in range(STEPS):
            engine.train_batch(iter(mine(step, 4, engine)))
        return {name: value.clone() for name, value in engine.module.state_dict().items()}


def test_weights_are_equal_bit_for_bit_if_no_sum_has_another_order() -> None:
    (expected,) = run_ranks(weights, 1, 1, 0)
    for num_stages, stage in ((2, 2), (4, 3)):
        together: dict[str, torch.Tensor] = {}
        for part in run_ranks(weights, num_stages, num_stages, stage):
            together.update(part)
        assert together.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(expected[name], together[name])] == []


def _torchs() -> tuple[list[float], list[float]]:
    """Return the losses of torch's 1F1B and of ours, over the same layers and batches, with plain SGD."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, count = torch.distributed.get_rank(), 4
    with pipelined(
        2, 0, count, tied=False, gradient_clipping=0.0, optimizer={"type": "SGD", "params": {"lr": 0.1}}
    ) as engine:
        ours = [engine.train_batch(iter(data(step, count))).item() for step in range(STEPS)]
        bounds = engine.module.bounds
    torch.manual_seed(0)
    built = [each.build() if hasattr(each, "build") else Function(each) for each in layers(tied=False)]
    part = nn.Sequential(*built[bounds[rank] : bounds[rank + 1]])
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, count, loss_fn=loss_of)
    optimizer, theirs = torch.optim.SGD(part.parameters(), lr=0.1), []
    for step in range(STEPS):
        inputs, labels = (torch.cat(each) for each in zip(*data(step, count)))
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=labels, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(float(torch.stack(losses).mean()) if losses else 0.0)
    return theirs, ours


class Function(nn.Module):
    """A layer without parameters."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.function(value)  # type: ignore[no-any-return]


def test_torchs_1f1b_has_the_same_losses() -> None:
    first, last = run_ranks(_torchs, 2)
    assert last[0] == pytest.approx(first[1], rel=1e-6)
    assert first[1] == last[1]


def _failing(stage: int) -> tuple[str, str, str]:
    """Return this rank's error when the loss function of rank 3 raises, in two replicas of two stages."""
    with pipelined(2, stage, 4) as engine:
        engine.train_batch(iter(mine(0, 4, engine)))

        def loss_fn(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            if torch.distributed.get_rank() == 3:
                raise ArithmeticError("no loss today")
            return loss_of(output, labels)

        engine.module.loss_fn = loss_fn
        with pytest.raises((ArithmeticError, zcomm.CollectiveFailed)) as first:
            engine.train_batch(iter(mine(1, 4, engine)))
        with pytest.raises((PipelineError, zcomm.CollectiveFailed)) as second:
            engine.train_batch(iter(mine(2, 4, engine)))
        with pytest.raises((PipelineError, zcomm.CollectiveFailed)) as third:
            engine.eval_batch(iter(mine(2, 4, engine)))
    return str(first.value), str(second.value), str(third.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_that_raises_is_reported_on_all_stages_and_replicas(stage: int) -> None:
    words = "rank 3 (stage 1 of 2) failed in the forward of micro-batch 0 at stage 1 (1F0): ArithmeticError: no loss"
    *others, failing = run_ranks(_failing, 4, stage)
    assert failing[0] == "no loss today"
    for texts in (*others, failing[1:]):
        assert all(words in text for text in texts)
