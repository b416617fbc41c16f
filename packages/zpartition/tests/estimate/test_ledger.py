"""Bytes of a live partition, by owner."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy

STAGES = (0, 1, 2, 3)


def _ledger(stage: int, dtype: torch.dtype) -> tuple[dict[str, int], int, int, int]:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    partition = zpartition.shard(model, optimizer, policy=ZeroPolicy(stage=stage, bucket_numel=2 * 64 * 65))
    for _ in range(2):
        for index in range(2):
            with partition.micro_step(is_last=index == 1):
                model(torch.randn(2, 64, dtype=dtype)).sum().backward()
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()
    state = sum(value.nbytes for entry in optimizer.state.values() for value in entry.values() if value.dim())
    layout = partition.layout
    return partition.ledger(), state, layout.padded_numel, max(bucket.numel for bucket in layout.buckets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", STAGES)
def test_the_bytes_of_each_owner_are_what_the_layout_says(stage, dtype):
    for each in run_ranks(_ledger, 2, stage, dtype):
        _check_ledger(each, stage, dtype)


def _check_ledger(found: tuple[dict[str, int], int, int, int], stage: int, dtype: torch.dtype) -> None:
    ledger, state, numel, bucket = found
    share = 1 if stage == 0 else 2
    assert ledger["parameters"] == numel * dtype.itemsize
    assert ledger["masters"] == (0 if dtype is torch.float32 else 4 * numel // share)
    assert state == 8 * numel // share
    if stage == 0 and dtype is torch.float32:
        assert ledger["accumulators"] == 0  # the reduced bucket itself
        assert ledger["buckets"] <= 4 * numel + 3 * 4 * bucket
    else:
        assert ledger["accumulators"] == 4 * numel // share
        assert ledger["buckets"] <= 3 * bucket * dtype.itemsize
