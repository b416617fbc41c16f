"""A rank that fails in a batch raises its own error; all others raise one that names the rank, action and cause."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcomm
from zcomm.testing import RankFailed, run_ranks
from zpartition.pipeline import AbortGuard, LayerSpec, PipelineError, PipelineModule, PipelineRunner, StageFailed

WIDTH, MICRO = 4, 4


class Breaks(nn.Module):
    """A layer that raises in forward or backward of one micro-batch on the given ranks of the world."""

    def __init__(self, ranks: tuple[int, ...] = (), micro: int = 0, backward: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.ranks, self.micro, self.backward, self.seen = ranks, micro, backward, 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = value * self.weight
        if dist.get_rank() not in self.ranks:
            return value
        if self.backward:
            value.register_hook(lambda gradient: self.count())
        else:
            self.count()
        return value

    def count(self) -> None:
        self.seen += 1
        if self.seen > self.micro:
            raise ArithmeticError("no such number")


def loss_of(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (output - labels).square().mean()


def batches() -> Iterator[Any]:
    return iter([(torch.ones(2, WIDTH), torch.zeros(2, WIDTH))] * MICRO)


def caught(schedule: str, per_rank: int, layer: dict[str, Any], call: str = "train_batch") -> tuple[Any, ...]:
    """(class of the error, its text, the text of a second batch's error)."""
    stages = dist.get_world_size() * per_rank
    model = PipelineModule(
        [LayerSpec(Breaks, **layer) for _ in range(stages)],
        num_stages=dist.get_world_size(),
        stages_per_rank=per_rank,
        loss_fn=loss_of,
    )
    runner = PipelineRunner.over(model, schedule)
    with pytest.raises(Exception) as first:
        getattr(runner, call)(batches(), MICRO)
    with pytest.raises(PipelineError) as second:
        runner.train_batch(batches(), MICRO)
    assert not runner.in_flight
    assert not runner.p2p.channels.in_flight
    with pytest.raises(zcomm.CollectiveFailed):  # such as in a checkpoint: raises at once, too
        zcomm.all_reduce(torch.ones(1))
    return type(first.value), str(first.value), str(second.value)


@pytest.mark.parametrize(
    ("world", "schedule", "per_rank", "layer", "failing", "where"),
    [
        (2, "1f1b", 1, {"micro": 2}, 1, "the forward of micro-batch 2 at stage 1 (1F2)"),
        (
            2,
            "zero_bubble",
            1,
            {"micro": 1, "backward": True},
            0,
            "the backward to the input of micro-batch 1 at stage 0",
        ),
        (4, "gpipe", 1, {"micro": 3}, 0, "the forward of micro-batch 3 at stage 0 (0F3)"),
        (4, "1f1b", 1, {"micro": 0, "backward": True}, 2, "the backward of micro-batch 0 at stage 2 (2B0)"),
        (2, "interleaved", 2, {"micro": 0}, 1, "the forward of micro-batch 0 at stage 1 (1F0)"),
    ],
)
def test_all_ranks_name_the_failing_rank(
    world: int, schedule: str, per_rank: int, layer: dict[str, Any], failing: int, where: str
) -> None:
    found = run_ranks(caught, world, schedule, per_rank, {"ranks": (failing,), **layer})
    expected = f"rank {failing} (stage "
    for rank, (kind, text, again) in enumerate(found):
        assert expected in again
        assert where in again
        if rank == failing:
            assert (kind, text) == (ArithmeticError, "no such number")
            continue
        assert kind is StageFailed
        assert text.startswith(expected)
        assert f"failed in {where}" in text
        assert "ArithmeticError: no such number" in text
        assert f"This is rank {rank} (stage " in text


def test_a_failing_evaluation_raises_on_all_ranks() -> None:
    """It fails in its last forward: the other rank has finished its own, and waits for the loss."""
    first, second = run_ranks(caught, 2, "1f1b", 1, {"ranks": (1,), "micro": MICRO - 1}, "eval_batch")
    assert (first[0], second[0]) == (StageFailed, ArithmeticError)
    assert "the forward of micro-batch 3 at stage 1 (1F3): ArithmeticError" in first[1]


def data_end() -> tuple[str, str]:
    model = PipelineModule([LayerSpec(Breaks), LayerSpec(Breaks)], num_stages=2, loss_fn=loss_of)
    runner = PipelineRunner.over(model)
    short = list(batches())[: MICRO if dist.get_rank() else 2]
    with pytest.raises((ValueError, StageFailed)) as first:
        runner.train_batch(iter(short), MICRO)
    return type(first.value).__name__, str(first.value)


def test_data_that_end_on_one_rank_raise_on_all_ranks() -> None:
    (kind, own), (other, message) = run_ranks(data_end, 2)
    assert (kind, other) == ("ValueError", "StageFailed")
    assert "the data ended after 2 micro-batches" in own
    assert f"the forward of micro-batch 2 at stage 0 (0F2): ValueError: {own}" in message


def test_a_pipeline_of_one_rank_continues_after_an_error() -> None:
    alarm = AbortGuard(PipelineModule([LayerSpec(Breaks)], num_stages=1))
    with pytest.raises(ArithmeticError), alarm.guard("a batch"):
        raise ArithmeticError
    with alarm.guard("another"):
        assert alarm.failure == ""


def killed() -> str:
    class Ends(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return value

    model = PipelineModule([LayerSpec(Breaks), LayerSpec(Ends), LayerSpec(Breaks)], num_stages=3, loss_fn=loss_of)
    runner = PipelineRunner.over(model)
    runner.train_batch(batches(), MICRO)
    return "unreachable"


def test_a_dead_process_is_named() -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(killed, 3)
    text = str(caught.value)
    assert text.count("StageFailed: Rank 1 is gone: its process has ended (process ") == 2
    assert "This is rank 0 (stage 0 of 3), which was in" in text
    assert "This is rank 2 (stage 2 of 3), which was in the forward of micro-batch 0 at stage 2 (2F0)" in text
