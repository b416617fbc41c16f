"""Evaluation on held-out windows: each is counted once."""

from __future__ import annotations

import pytest
import torch

from train.evaluate import BATCH, rank_batches


@pytest.mark.parametrize(("count", "ranks"), [(64, 2), (BATCH * 2 + 1, 2), (2, 3), (1, 4)])
def test_each_window_counts_once_and_ranks_have_as_many_batches(count: int, ranks: int) -> None:
    windows = torch.arange(count).unsqueeze(1)
    found = [rank_batches(windows, rank, ranks) for rank in range(ranks)]
    assert len({len(batches) for batches, _ in found}) == 1
    assert all(len(batch) for batches, _ in found for batch in batches)
    counted = [batch[:number] for batches, counts in found for batch, number in zip(batches, counts, strict=True)]
    assert sorted(torch.cat(counted).flatten().tolist()) == list(range(count))
