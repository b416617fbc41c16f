"""Sparse gradients of embeddings: sums, messages and training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import SparseGradients, ZeroPolicy
from zpartition.gradients.sparse import SparseRows, add_rows


def test_rows_that_come_again_are_added_up() -> None:
    rows = SparseRows(2)
    for _ in range(2):
        rows.add(torch.sparse_coo_tensor(torch.tensor([[3, 1, 3]]), torch.ones(3, 2), (5, 2), check_invariants=True))
    indices, values = rows.packed(torch.float32, torch.device("cpu"))
    assert indices.tolist() == [1, 3]
    assert values.tolist() == [[2, 2], [4, 4]]
    rows.add(torch.full((5, 2), 10.0))  # a weight that is used in another way, too
    indices, values = rows.packed(torch.float32, torch.device("cpu"))
    assert indices.tolist() == [0, 1, 2, 3, 4]
    assert values[:, 0].tolist() == [10, 12, 10, 14, 10]
    rows.clear()
    assert rows.packed(torch.bfloat16, torch.device("cpu"))[1].shape == (0, 2)


@pytest.mark.parametrize("span", [(0, 60), (0, 31), (31, 60), (7, 9), (7, 23), (59, 60), (12, 12)])
def test_rows_are_added_to_whatever_part_of_them_a_span_holds(span: tuple[int, int]) -> None:
    torch.manual_seed(0)
    parts = [(torch.tensor([1, 4, 11]), torch.randn(3, 5)), (torch.arange(12), torch.randn(12, 5))]
    whole = torch.ones(12, 5)
    for indices, values in parts:
        whole[indices] += 0.5 * values
    kept = torch.ones(span[1] - span[0])
    add_rows(kept, span, parts, 0.5)
    torch.testing.assert_close(kept, whole.flatten()[slice(*span)], rtol=0, atol=1e-6)


class Net(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(1000, 12, sparse=sparse)
        self.bag = nn.EmbeddingBag(300, 7, sparse=sparse)
        self.head = nn.Linear(19, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.cat((self.embed(tokens).mean(1), self.bag(tokens % 300)), 1)
        return self.head(x).square().mean()


def tokens(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randint(
        0, 1000, (3, 4 + rank), generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    )


def _trains(stage: int, accumulation: int, sparse: bool, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], int]:
    model = Net(sparse=True).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    policy = ZeroPolicy(
        stage=stage,
        sparse_gradients=SparseGradients.ROWS if sparse else SparseGradients.DENSE,
        unit_numel=5000,
        persist_numel=50,
    )
    partition = zpartition.shard(model, optimizer, policy=policy)
    log: Any = []
    for step in range(3):
        log.clear()
        with zcomm.traced(log):
            for micro in range(accumulation):
                with partition.micro_step(is_last=micro == accumulation - 1):
                    (model(tokens(step, micro, zcomm.group_rank())) / accumulation).backward()
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()
    sent = sum(record.nbytes for record in log if record.op != "all_gather" or "rows" in record.label)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, sent


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_equals_one_process(stage: int, world_size: int, accumulation: int) -> None:
    model = Net(sparse=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        for micro in range(accumulation):
            for rank in range(world_size):
                (model(tokens(step, micro, rank)) / accumulation / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found, _ in run_ranks(_trains, world_size, stage, accumulation, True, torch.float32):
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(found[name], tensor, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_send_a_fraction_of_what_dense_gradients_send(dtype: torch.dtype) -> None:
    ((_, sparse), _), ((_, dense), _) = (run_ranks(_trains, 2, 2, 1, kind, dtype) for kind in (True, False))
    assert 0 < 4 * sparse < dense


def test_stages_agree_bit_for_bit() -> None:
    results = [run_ranks(_trains, 2, stage, 2, True, torch.float32)[0][0] for stage in (0, 1, 2, 3)]
    for found in results[1:]:
        assert all(torch.equal(found[name], tensor) for name, tensor in results[0].items())


class Late(nn.Module):
    """Its rows come first in backward, on those ranks that train them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        self.table = nn.Embedding(40, 32, sparse=True)

    def forward(self, x: torch.Tensor, *, looks: bool) -> torch.Tensor:
        hidden, rows = self.layers(x), self.table(torch.arange(3))
        return (hidden + (rows if looks else rows.detach())).square().mean()


def _one_rank_looks(stage: int) -> torch.Tensor:
    model, rank = Late(), zcomm.group_rank()
    policy = ZeroPolicy(stage=stage, unit_numel=1100, persist_numel=0, max_live_numel=0, prefetch_numel=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    partition = zpartition.shard(model, optimizer, policy=policy)
    for step in range(4):
        with partition.micro_step():
            model(torch.ones(3, 32), looks=step == 0 or rank == 0).backward()
        partition.finish_gradients()
        partition.apply(optimizer.step, any_unused=True)
        partition.zero_grad()
    partition.close()
    return model.table.weight.detach()


def test_rows_that_one_rank_has_and_another_has_not_hold_nobody_up() -> None:
    found, expected = run_ranks(_one_rank_looks, 2, 3), run_ranks(_one_rank_looks, 2, 2)
    assert all(torch.equal(table, expected[0]) for table in (*found, *expected))
