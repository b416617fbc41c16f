"""Full weights at stage 3: blocks that read and write, and state dicts."""

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
    assert partition.unsharder.live_numel == 0
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


def test_edits_without_a_modifier_are_rejected_on_every_rank_and_undone() -> None:
    assert all(torch.equal(found, reference()["0.weight"]) for found in run_ranks(_writes_without_leave, 2))


def _agrees(dtype: torch.dtype, rests: str) -> tuple[float, bool, bool]:
    """Every rank writes the same, into one of two weights that share a unit or stay whole (dtypes below float32 have
    masters with more digits)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)).to(dtype)
    policy = ZeroPolicy(stage=3, unit_numel=1000, persist_numel=0 if rests == "units" else 1000, max_live_numel=0)
    partition = zpartition.shard(model, torch.optim.SGD(model.parameters(), lr=1e-3), policy=policy)
    model(torch.ones(1, 10, dtype=dtype)).float().square().sum().backward()
    partition.finish_gradients()
    partition.apply(partition.optimizer.step)
    partition.zero_grad()
    weight, other = model[0].weight, model[1].weight
    before = zpartition.safe_get_full_fp32_param(other)
    with zpartition.gathered([weight, other]), torch.no_grad():
        weight.copy_(torch.lerp(torch.full_like(weight, 2.0), weight, 0.0))
    partition.publish()
    with zpartition.gathered([weight, other]):
        shown = float(weight.detach().float().mean())
    master = zpartition.safe_get_full_fp32_param(weight)
    return shown, bool((master == 2.0).all()), torch.equal(before, zpartition.safe_get_full_fp32_param(other))


@pytest.mark.parametrize("rests", ["units", "whole"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2])
def test_what_all_ranks_write_alike_counts_without_a_modifier(world: int, dtype: torch.dtype, rests: str) -> None:
    assert run_ranks(_agrees, world, dtype, rests) == [(2.0, True, True)] * world


def _disagrees_whole() -> float:
    torch.manual_seed(0)
    model = nn.Linear(10, 10)
    policy = ZeroPolicy(stage=3, persist_numel=1000)
    partition = zpartition.shard(model, torch.optim.SGD(model.parameters(), lr=1e-3), policy=policy)
    assert partition.whole
    before = float(model.weight.detach().sum())
    refused = pytest.raises(ValueError, match="without modifier_rank")
    with refused, zpartition.gathered(model), torch.no_grad():
        model.weight[0, zcomm.group_rank()] = 5.0
    return float(model.weight.detach().sum()) - before


def test_small_weights_that_ranks_write_differently_are_rejected_and_put_back() -> None:
    assert run_ranks(_disagrees_whole, 2) == [0.0, 0.0]


def _keeps_digits(stage: int) -> tuple[bool, bool]:
    model, partition = make(stage, torch.bfloat16)
    model(torch.ones(2, 10, dtype=torch.bfloat16)).float().square().sum().backward()
    partition.finish_gradients()
    partition.apply(partition.optimizer.step)
    partition.zero_grad()
    before = zpartition.safe_get_full_fp32_param(model[0].weight)
    assert not torch.equal(before, before.bfloat16().float())
    with zpartition.gathered(model[0], modifier_rank=0), torch.no_grad():
        pass  # looked at, with leave to write
    preserve_unused = torch.equal(zpartition.safe_get_full_fp32_param(model[0].weight), before)
    with zpartition.gathered(model[0], modifier_rank=0), torch.no_grad():
        model[0].weight[3] = 0.25
    after = zpartition.safe_get_full_fp32_param(model[0].weight)
    rest = torch.arange(20) != 3
    return preserve_unused, torch.equal(after[rest], before[rest]) and bool((after[3] == 0.25).all())


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_masters_keep_the_digits_of_what_was_not_written(world: int, stage: int) -> None:
    assert run_ranks(_keeps_digits, world, stage) == [(True, True)] * world


def _keeps_views() -> tuple[bool, int]:
    model, partition = make()
    with zpartition.gathered(model[0].weight):
        kept = model[0].weight.data  # as `.cpu()` returns it on a CPU
    with zpartition.gathered(model[2].weight):
        other = model[2].weight.data
    with zpartition.gathered(model):
        pass
    plain = reference()
    same = torch.equal(kept, plain["0.weight"]) and torch.equal(other, plain["2.weight"])
    return same, partition.unsharder.pool.num_made


def test_what_somebody_keeps_of_a_block_is_not_written_over() -> None:
    for same, num_made in run_ranks(_keeps_views, 2):
        assert same
        assert num_made <= 2  # those of the last block: what is kept is no longer the pool's


def _crosses() -> bool:
    """Blocks that end in the order in which they began."""
    model, partition = make()
    first, second = zpartition.gathered(model[0]), zpartition.gathered(model[2], modifier_rank=0)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    with torch.no_grad():
        model[2].weight.fill_(3.0)
    second.__exit__(None, None, None)
    assert not partition.unshard_hooks.blocks
    with zpartition.gathered(model[2]):
        return bool((model[2].weight == 3.0).all())


def test_blocks_may_end_in_any_order() -> None:
    assert run_ranks(_crosses, 2) == [True, True]


def _tells() -> list[list[bool]]:
    model, _ = make()
    names = [model[0].weight, model[0].bias, model[2].weight, model[3].weight]  # the last stays whole
    seen = []

    def look() -> None:
        seen.append([zpartition.is_gathered(param) for param in names])

    handle = model[0].register_forward_pre_hook(lambda *_: look())
    look()
    with zpartition.gathered(model[0].weight):
        look()
    with zpartition.gathered(model[3].weight):
        look()
    with torch.no_grad():
        model(torch.ones(1, 10))
    look()
    handle.remove()
    return seen


def test_who_asks_is_told_what_is_gathered() -> None:
    none = [False] * 4
    inside = [True, True, False, False]
    for seen in run_ranks(_tells, 2):
        assert seen == [none, inside, [False, False, False, True], inside, none]
    assert not zpartition.is_gathered(nn.Parameter(torch.ones(2)))


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
        model[2].weight.fill_(9.0 + rank)
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
    lost = pytest.raises(ValueError, match="unit '0' were released, because another gathered")
    editors = [zpartition.gathered(model, modifier_rank=0), zpartition.gathered(model[0], modifier_rank=1)]
    with lost, editors[0], contextlib.suppress(KeyError), editors[1]:
        raise KeyError
    refused = pytest.raises(ValueError, match="without modifier_rank")
    with refused, zpartition.gathered(model), torch.no_grad():
        model[0].weight.fill_(9.0 + zcomm.group_rank())
        with zpartition.gathered(model[0], modifier_rank=1):
            pytest.fail("what was written around it is nobody's")


def test_edits_that_are_lost_or_nobodys_are_told_of() -> None:
    run_ranks(_gives_up, 2)
