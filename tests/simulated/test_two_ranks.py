"""Two ranks on the simulated device, Gloo in the place of NCCL: contract rows and pipelines train as on the host."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcomm
from zcomm.testing import RankFailed, run_ranks
from zpartition.layout.link import measure_link
from zpartition.pipeline import LayerSpec, PipelineModule, PipelineRunner, TiedLayerSpec
from zpartition.pipeline.p2p import AgreedOrder

CONTRACT = str(Path(__file__).parents[1] / "contract")
WORLD_SIZE = 2


def test_every_row_trains_alike_on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(CONTRACT)
    run, rows = (importlib.import_module(f"contract_table.{name}") for name in ("run", "rows"))
    oracle = importlib.import_module("contract_table.oracle")
    chosen = [row for row in rows.ROWS if WORLD_SIZE in row.worlds]
    cases = [run.Case(row, "plain", torch.float32, 1) for row in chosen]
    first, second = run_ranks(run.run_cases, WORLD_SIZE, cases)
    expected = oracle.curve("plain", torch.float32, WORLD_SIZE, 1)
    for case, one, other in zip(cases, first, second, strict=True):
        assert not isinstance(one, str), f"{case}: {one}"
        mean = [(a + b) / WORLD_SIZE for a, b in zip(one.losses, other.losses)]
        assert mean == pytest.approx(expected, rel=2e-6), case
        assert one.weights == other.weights, case
        if case.row.same_bits:
            assert one.weights == first[0].weights, case


def measure_on_device() -> float:
    return measure_link(None, torch.device("cuda", torch.cuda.current_device())).bytes_per_s


def test_ranks_agree_on_a_link_that_they_measure_on_the_device() -> None:
    first, second = run_ranks(measure_on_device, WORLD_SIZE)
    assert first == second > 0


def read_messages(waits: bool) -> float:
    """Return the sum of what the other rank sends in a batch of messages."""
    rank, device = dist.get_rank(), torch.device("cuda", torch.cuda.current_device())
    mine, theirs = torch.ones(64, device=device), torch.zeros(64, device=device)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)])
    while works:
        work = works.pop()
        if waits:
            work.wait()
        del work  # which orders nothing
    return theirs.sum().item()


def test_a_batch_of_messages_must_be_waited_for() -> None:
    assert run_ranks(read_messages, WORLD_SIZE, True) == [64, 64]
    with pytest.raises(RankFailed, match=r"sum on the default stream reads memory that recv .* nothing orders"):
        run_ranks(read_messages, WORLD_SIZE, False)


def as_scores(words: nn.Embedding, value: torch.Tensor) -> torch.Tensor:
    return value @ words.weight.t()


def pipelined(place: str, schedule: str, per_rank: int, dynamic: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Return losses of two batches and an evaluation, and the weights of this rank, trained on `place`."""
    torch.manual_seed(0)
    words = [TiedLayerSpec("words", nn.Embedding, 11, 8, **more) for more in ({}, {"forward_fn": as_scores})]
    blocks = [LayerSpec(nn.Linear, 8, 8) for _ in range(2 * per_rank)]
    loss = lambda scores, labels: nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())  # noqa: E731
    model = PipelineModule(
        [words[0], *blocks, words[1]], 2, loss_fn=loss, stages_per_rank=per_rank, dynamic_shape=dynamic
    )
    device = torch.device(place, torch.cuda.current_device()) if place == "cuda" else torch.device(place)
    for part in (model, *model.tied_copies.values()):
        part.to(device)
    group = None if place == "cuda" else zcomm.duplicate_host_group(None)
    runner = PipelineRunner.over(model, schedule, group, device)
    assert isinstance(runner.p2p.messages, AgreedOrder) == (place == "cuda")
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.3), []
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        sizes = [(2, 3 + micro * dynamic) for micro in range(4)]
        data = [[torch.randint(11, size, generator=draw).to(device) for _ in "xy"] for size in sizes]
        if step == 2:
            losses.append(runner.eval_batch(iter(data), 4).item())
            break
        losses.append(runner.train_batch(iter(data), 4).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [param.detach().cpu() for param in model.parameters()]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("schedule", "per_rank"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)]
)
def test_a_pipeline_on_the_device_has_the_bits_of_the_host(schedule: str, per_rank: int, dynamic: bool) -> None:
    host = run_ranks(pipelined, WORLD_SIZE, "cpu", schedule, per_rank, dynamic)
    device = run_ranks(pipelined, WORLD_SIZE, "cuda", schedule, per_rank, dynamic)
    for (losses, weights), (expected, reference) in zip(device, host, strict=True):
        assert losses == expected
        assert all(torch.equal(*pair) for pair in zip(weights, reference, strict=True))
