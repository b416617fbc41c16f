"""Ranks with different batches process all of them together, one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zcomm
from zcomm.testing import run_ranks
from zpartition.sequence import ExchangedBatches, shift_labels


def batch(seed: int, length: int, **more: Any) -> dict[str, Any]:
    ids = torch.arange(2 * length).view(2, length) + 100 * seed
    return {"input_ids": ids, "labels": ids.clone(), "name": f"batch {seed}", **more}


def _traded() -> list[Any]:
    """Ranks have different batches, of different lengths; rank 1 has one fewer."""
    mine = zcomm.group_rank()
    source = [
        batch(10 * mine + index, 4 + 4 * mine, keep=torch.tensor([[True] * (4 + 4 * mine)] * 2))
        for index in range(3 - mine)
    ]
    if mine == 0:
        source[0]["only here"] = torch.ones(2, 4, dtype=torch.float64)
    batches = ExchangedBatches.over(source)
    assert len(batches) == (6 if mine == 0 else 4)
    found = []
    for each in batches:
        tensors = {key: value.tolist() for key, value in each.items() if isinstance(value, Tensor)}
        found.append({**tensors, "name": each["name"]})
    with pytest.raises(ValueError, match=r"rank 1: a batch: 5 tokens .* over 2"):
        list(ExchangedBatches.over([batch(0, 4 + mine)]))
    return found


def test_all_ranks_process_each_rank_s_batch_in_turn() -> None:
    first, second = run_ranks(_traded, 2)
    assert [each["name"] for each in first] == ["batch 0", "batch 10", "batch 1", "batch 11"]
    assert [each["name"] for each in second] == [each["name"] for each in first]
    for index, (seed, length) in enumerate([(0, 4), (10, 8), (1, 4), (11, 8)]):
        source = batch(seed, length)
        for key, whole in [("input_ids", source["input_ids"]), ("shift_labels", shift_labels(source["labels"]))]:
            joined = torch.cat([torch.tensor(rank[index][key]) for rank in (first, second)], 1)
            assert torch.equal(joined, whole)
        assert first[index]["keep"] == [[True] * (length // 2)] * 2
    assert first[0]["only here"] == [[1.0, 1.0]] * 2
    assert "only here" not in first[1]
