"""Updated weights in messages of a limited size: the same bits, and the messages that the plan counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zcomm
from zcomm.testing import run_ranks
from zpartition import Offload
from zpartition.estimate.memory import plan
from zpartition.estimate.traffic import plan_traffic
from zpartition.testing import Net, fingerprint, make, train

MESSAGE = "weights["


def _train(stage: int, dtype: torch.dtype, gather_numel: int, wire: torch.dtype | None) -> dict[str, Any]:
    model, optimizer, partition = make(Offload(), stage, dtype, gather_numel=gather_numel, reduce_dtype=wire)
    train(partition, model, optimizer, range(2), 1)
    with zcomm.traced([]) as records:
        train(partition, model, optimizer, range(2, 3), 1)
    size = zcomm.group_size()
    sent = [each.numel for each in records if each.label.startswith(MESSAGE)]
    planned = plan_traffic(Net(dtype), policy=partition.policy, world_size=size, optimizer=torch.optim.AdamW)
    memory = plan(Net(dtype), policy=partition.policy, world_size=size, optimizer=torch.optim.AdamW)
    row = {
        "weights": fingerprint(partition, model),
        "sent": sent,
        "planned": {flow.what: flow.num_messages for flow in planned.flows}["updated weights, all-gather"],
        "buckets": (partition.ledger()["buckets"], memory.buckets),
        "all": sum(storage.flat.numel() for storage in partition.whole),
    }
    partition.close()
    return row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [2, 4])
def test_messages_have_at_most_so_many_elements_and_the_bits_stay(
    world_size: int, stage: int, dtype: torch.dtype
) -> None:
    wholes = run_ranks(_train, world_size, stage, dtype, 0, None)
    for limit in (10**6, 1000, 333, 100):
        for whole, row in zip(wholes, run_ranks(_train, world_size, stage, dtype, limit, None), strict=True):
            assert same(whole["weights"], row["weights"])
            assert len(row["sent"]) == row["planned"]
            assert sum(row["sent"]) == sum(whole["sent"])
            if limit < 10**6:
                assert max(row["sent"]) <= limit < max(whole["sent"])
            else:
                assert row["sent"] == whole["sent"], "a bucket below the limit is one message, in place"
            assert row["buckets"][0] <= row["buckets"][1], "pieces pass through buffers of gradients"


def test_pieces_beside_wider_gradients_leave_no_buffer_behind() -> None:
    rows = run_ranks(_train, 2, 2, torch.bfloat16, 1000, torch.float32)
    wholes = run_ranks(_train, 2, 2, torch.bfloat16, 0, torch.float32)
    for whole, row in zip(wholes, rows, strict=True):
        assert same(whole["weights"], row["weights"])
        assert row["buckets"] == whole["buckets"]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
