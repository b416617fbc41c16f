"""Whole weights at stage 3: blocks that read and write, and state dicts."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy


def make(stage: int = 3, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, zpartition.Partition]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 10), nn.LayerNorm(10)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    policy = ZeroPolicy(stage=stage, unit_numel=300, persist_numel=15, max_live_numel=0)
    return model, zpartition.shard(model, optimizer, policy=policy)


def reference(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 10), nn.LayerNorm(10)).to(dtype)
    return model.state_dict()


def _reads() -> torch.Tensor:
    model, partition = make()
    with zpartition.gathered(model[0]):
        with zpartition.gathered(model):  # nested
            pass
        inside = model[0].weight.detach().clone()
        assert bool(model[2].weight.isnan().all()), "only what was asked for"
    assert bool(model[0].weight.isnan().all())
    assert partition.residence.live_numel == 0
    return inside


def test_inside_the_block_weights_are_whole() -> None:
    assert all(torch.equal(found, reference()["0.weight"]) for found in run_ranks(_reads, 2))


def _writes(stage: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    model, partition = make(stage, dtype)
    with zpartition.gathered(model[0].weight, modifier_rank=1), torch.no_grad():
        if zcomm.group_rank() == 1:
            model[0].weight.fill_(0.25)
    masters = [shard.tensor for shard in partition.shards() if shard.name == "0.weight"]
    return model.state_dict()["0.weight"], torch.cat([*masters, torch.zeros(0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_the_modifier_writes_reaches_every_rank_and_its_master(stage: int, dtype: torch.dtype) -> None:
    for whole, master in run_ranks(_writes, 2, stage, dtype):
        assert torch.equal(whole, torch.full((20, 10), 0.25, dtype=dtype))
        assert torch.equal(master, torch.full_like(master, 0.25))


def _writes_without_leave() -> torch.Tensor:
    model, _ = make()
    refused = pytest.raises(ValueError, match=r"edited inside gathered\(...\).*Pass modifier_rank=0")
    with refused, zpartition.gathered(model), torch.no_grad():
        model[0].weight.fill_(float(zcomm.group_rank()))
    return model.state_dict()["0.weight"]


def test_edits_without_a_modifier_are_refused_on_every_rank_and_undone() -> None:
    assert all(torch.equal(found, reference()["0.weight"]) for found in run_ranks(_writes_without_leave, 2))


def _saves() -> dict[str, torch.Tensor]:
    model, _ = make()
    state: dict[str, Any] = model.state_dict()
    child = model[0].state_dict()
    assert torch.equal(child["weight"], state["0.weight"])
    return state


def test_a_state_dict_is_whole() -> None:
    for found in run_ranks(_saves, 2):
        assert list(found) == list(reference())
        assert all(torch.equal(found[name], tensor) for name, tensor in reference().items())


def _loads() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model, partition = make()
    new = {name: torch.full_like(tensor, zcomm.group_rank() + 3.0) for name, tensor in reference().items()}
    model.load_state_dict(new)
    partition.synchronise()
    return model.state_dict(), {shard.name: shard.tensor.clone() for shard in partition.shards()}


def test_what_is_loaded_on_rank_0_counts() -> None:
    for found, masters in run_ranks(_loads, 2):
        assert all(bool((tensor == 3.0).all()) for tensor in found.values())
        assert all(bool((tensor == 3.0).all()) for tensor in masters.values())


def test_a_module_that_nobody_partitioned_is_left_alone() -> None:
    model = nn.Linear(2, 2)
    with zpartition.gathered(model, modifier_rank=0), torch.no_grad():
        model.weight.fill_(1.0)
    assert bool((model.weight == 1.0).all())


def _nests() -> list[tuple[float, float]]:
    model, _ = make()
    rank, seen = zcomm.group_rank(), []

    def look() -> tuple[float, float]:
        state = model.state_dict()
        return float(state["0.weight"].mean()), float(state["2.weight"].mean())

    with zpartition.gathered(model), zpartition.gathered(model[0], modifier_rank=1), torch.no_grad():
        model[0].weight.fill_(rank + 1.0)
    seen.append(look())
    with zpartition.gathered(model, modifier_rank=0), torch.no_grad():
        model[2].weight.fill_(rank + 3.0)
        with zpartition.gathered(model[2]):  # sees what the block around it has written so far
            inside = float(model[2].weight.mean())
        assert inside == rank + 3.0
    seen.append(look())
    refused = pytest.raises(ValueError, match="without modifier_rank")
    with (
        zpartition.gathered(model[0].weight, modifier_rank=0),
        refused,
        zpartition.gathered(model[2]),
        torch.no_grad(),
    ):
        model[2].weight.fill_(9.0)
    seen.append(look())
    return seen


def test_nested_blocks_each_answer_for_their_own_edits() -> None:
    for seen in run_ranks(_nests, 2):
        assert seen[0][0] == 2.0
        assert seen[1:] == [(2.0, 3.0)] * 2


def _two_editors(stage: int) -> tuple[list[float], float]:
    """Rank 0 around and rank 1 inside write rows of one matrix; then something is raised inside."""
    model, _ = make(stage)
    rank, weight = zcomm.group_rank(), model[0].weight
    with zpartition.gathered(model, modifier_rank=0), torch.no_grad():
        weight[0] = 1.0 + rank
        with zpartition.gathered(weight, modifier_rank=1):
            assert float(weight[0, 0]) == 1.0, "the ranks agree on what was written before"
            weight[1] = 2.0 + rank
        weight[2] = 5.0 + rank
    rows = model.state_dict()["0.weight"][:3].mean(1).tolist()
    with zpartition.gathered(model, modifier_rank=0), torch.no_grad():
        weight[0] = 7.0
        with contextlib.suppress(KeyError), zpartition.gathered(model):
            raise KeyError
        assert float(weight[0, 0]) == 7.0, "a block that only reads gives nothing up"
    return rows, float(model.state_dict()["0.weight"][0, 0])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_block_inside_does_not_undo_what_was_written_around_it(stage: int) -> None:
    assert run_ranks(_two_editors, 2, stage) == [([1.0, 3.0, 5.0], 7.0)] * 2


def _gives_up() -> None:
    model, _ = make()
    lost = pytest.raises(ValueError, match="unit '0' are gone: something raised inside another gathered")
    editors = [zpartition.gathered(model, modifier_rank=0), zpartition.gathered(model[0], modifier_rank=1)]
    with lost, editors[0], contextlib.suppress(KeyError), editors[1]:
        raise KeyError
    refused = pytest.raises(ValueError, match="without modifier_rank")
    with refused, zpartition.gathered(model), torch.no_grad():
        model[0].weight.fill_(9.0)
        with zpartition.gathered(model[0], modifier_rank=1):
            pytest.fail("what was written around it is nobody's")


def test_edits_that_are_lost_or_nobodys_are_told_of() -> None:
    run_ranks(_gives_up, 2)
