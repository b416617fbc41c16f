"""What is parked is gone from the device, comes back bit for bit, and is missed in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zpartition
from zcomm.testing import run_ranks
from zpartition import Holding, Offload, Tier
from zpartition.testing import backward, differing, fingerprint, make, train


def _away_and_back(offload: Offload, stage: int, dtype: torch.dtype, directory: str) -> list[str]:
    model, optimizer, partition = make(offload, stage, dtype)
    train(partition, model, optimizer, range(2), 1)
    before, held = fingerprint(partition, model), partition.ledger()
    partition.offload_states(directory=directory)
    for owner in ("parameters", "masters", "accumulators", "states", "buckets"):
        assert partition.ledger()[owner] == 0, owner
    if directory:
        assert not partition.ledger().get("host states")
    for use in (
        lambda: model(torch.ones(1, 24, dtype=dtype), True),
        lambda: partition.apply(optimizer.step),
        lambda: zpartition.safe_get_full_fp32_param(model.last.bias),
        lambda: list(partition.shards()),
        partition.offload_states,
    ):
        with pytest.raises(RuntimeError, match=r"reload_states\(\), on every rank, first"):
            use()
    partition.reload_states()
    partition.reload_states()
    wrong = differing(before, fingerprint(partition, model))
    train(partition, model, optimizer, range(2, 4), 1)
    now = partition.ledger()  # buffers are made anew, and fewer at once than in the very first step
    assert {owner: now[owner] for owner in held if owner not in ("buckets", "gathered units")} == {
        owner: size for owner, size in held.items() if owner not in ("buckets", "gathered units")
    }
    found = fingerprint(partition, model)
    partition.close()
    model, optimizer, partition = make(Offload(), stage, dtype)
    train(partition, model, optimizer, range(4), 1)
    wrong += differing(fingerprint(partition, model), found)
    partition.close()
    return wrong


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_that_was_parked_goes_on_as_one_that_was_not(dtype: torch.dtype, on_disk: bool, tmp_path: Path) -> None:
    for stage, offload in ((0, Offload()), (2, Offload(states=Tier.HOST, ratio=0.5)), (3, Offload())):
        for wrong in run_ranks(_away_and_back, 2, offload, stage, dtype, str(tmp_path) if on_disk else ""):
            assert not wrong, stage
    assert not list(tmp_path.iterdir())


def test_single_kinds_leave_the_others_where_they_are() -> None:
    model, optimizer, partition = make(Offload(), 0, torch.bfloat16)
    train(partition, model, optimizer, range(1), 1)
    held = partition.ledger()
    partition.offload_states([Holding.STATES, Holding.MASTERS])
    assert {owner for owner, size in partition.ledger().items() if size != held[owner]} == {"states", "masters"}
    model(torch.ones(1, 24, dtype=torch.bfloat16), True)  # weights are there
    partition.reload_states()
    assert partition.ledger() == held
    partition.close()


def test_in_the_middle_of_a_step_it_is_refused() -> None:
    model, _, partition = make(Offload(), 0, torch.float32)
    backward(partition, model, 0, 1)
    with pytest.raises(ValueError, match="call it between steps"):
        partition.offload_states()
    partition.close()
