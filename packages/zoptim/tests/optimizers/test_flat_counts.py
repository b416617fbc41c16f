"""Different step counts: of tensors in one group, and of tensors in one flat shard."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim
from zoptim import Segment

SHAPES = [(8, 5), (7,), (300,), (16, 16)]
STARTS = [0, 48, 64, 512]
NUMEL = 800
# Which tensors each step updates.
USED = [(0, 1), (0,), (0, 3), (1, 3), (0, 1, 3), (0, 3)]


@pytest.mark.parametrize("more", [{}, {"foreach": True}], ids=["kernel", "torch"])
def test_tensors_of_a_group_count_for_themselves_as_in_torch(more: dict[str, Any], lab: Any) -> None:
    ours, theirs = lab.make_params(SHAPES), lab.make_params(SHAPES)
    mine, other = zoptim.AdamW(ours, lr=0.05, **more), torch.optim.AdamW(theirs, lr=0.05)
    for step, used in enumerate(USED):
        for params, optimizer in ((ours, mine), (theirs, other)):
            for index, grad in enumerate(lab.make_grads(step, SHAPES)):
                params[index].grad = grad if index in used else None
            optimizer.step()
    assert [int(mine.state[param]["step"]) for param in ours if param in mine.state] == [5, 3, 4]
    assert ours[2] not in mine.state
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def segments() -> list[Segment]:
    return [Segment(start, shape, index) for index, (start, shape) in enumerate(zip(STARTS, SHAPES))]


class Alone:
    """A team of one rank."""

    rank, world_size = 0, 1

    def all_reduce(self, tensor: Tensor) -> None: ...

    def exchange(self, outgoing: Tensor, numels: Any) -> Tensor:
        return outgoing


def lamb(params: list[Tensor]) -> zoptim.LAMB:
    return zoptim.LAMB(params, lr=0.05, weight_decay=0.1)


def muon(params: list[Tensor]) -> zoptim.Muon:
    return zoptim.Muon([{"params": params, "use_muon": False}], lr=0.05, weight_decay=0.1)


@pytest.mark.parametrize("make", [lamb, muon])
def test_segments_of_a_shard_are_updated_by_counts_of_their_own(make: Any, lab: Any) -> None:
    """The oracle is the same optimizer on whole tensors."""
    whole = lab.make_params(SHAPES)
    shard = torch.zeros(NUMEL)
    state = {
        "step": torch.tensor([9.0, 0.0, 2.0, 3.0]),
        "exp_avg": torch.zeros(NUMEL),
        "exp_avg_sq": torch.zeros(NUMEL),
    }
    alone = make(whole)
    for segment, param, count in zip(segments(), whole, state["step"]):
        shard[segment.row] = param.detach().flatten()
        alone.state[param] = {
            "step": count.clone(),
            **{k: torch.zeros_like(param) for k in ("exp_avg", "exp_avg_sq")},
        }
    shard.requires_grad_()
    flat = make([shard])
    flat.place_on_ranks({shard: [segments()]}, Alone())
    flat.state[shard] = {**state, "alike": torch.tensor([1, 2, 3, 4])}
    for step in range(3):
        grads = lab.make_grads(step, SHAPES)
        shard.grad = torch.zeros(NUMEL)
        for segment, grad in zip(segments(), grads):
            shard.grad[segment.row] = grad.flatten()
        flat.step()
        lab.run(alone, whole, range(step, step + 1), SHAPES)
    assert flat.state[shard]["step"].tolist() == [12, 3, 5, 6]
    lab.assert_bitwise([shard.detach()[s.row].view(s.shape) for s in segments()], [p.detach() for p in whole])


def test_a_shard_with_part_counts_but_no_segments_raises() -> None:
    shard = torch.zeros(NUMEL, requires_grad=True)
    optimizer = zoptim.AdamW([shard])
    optimizer.state[shard] = {
        "step": torch.tensor([1.0, 2.0]), "exp_avg": torch.zeros(NUMEL), "exp_avg_sq": torch.zeros(NUMEL)
    }  # fmt: skip
    shard.grad = torch.ones(NUMEL)
    with pytest.raises(ValueError, match=r"parameter 0 of group 0, a flat shard, have different step counts"):
        optimizer.step()
    flat = lamb([shard])
    flat.place_on_ranks({shard: [segments()]}, Alone())
    flat.state[shard] = optimizer.state[shard]
    with pytest.raises(ValueError, match="2 step counts for 4 segments"):
        flat.step()


@pytest.mark.parametrize("state_dtype", [None, "8bit"])
def test_counts_of_parts_travel_with_the_state(state_dtype: str | None) -> None:
    shard = torch.zeros(NUMEL, requires_grad=True)
    optimizer = zoptim.AdamW([shard], state_dtype=state_dtype)
    shard.grad = torch.ones(NUMEL)
    optimizer.step()
    columns = {"step": torch.tensor([1.0, 4.0]), "alike": torch.tensor([1, 2])}
    optimizer.state[shard].update(columns)
    for found in (copy.deepcopy(optimizer.state_dict())["state"][0], optimizer.portable_state(shard)):
        assert all(torch.equal(found[key], value) for key, value in columns.items())
    other = zoptim.AdamW([shard], state_dtype=state_dtype)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(torch.equal(other.state[shard][key], value) for key, value in columns.items())
    numbers = {
        key: v.read(0, NUMEL) if hasattr(v, "read") else v for key, v in optimizer.portable_state(shard).items()
    }
    other.load_portable_state(shard, numbers)
    assert all(torch.equal(other.state[shard][key], value) for key, value in columns.items())
    assert all(torch.equal(value, optimizer.state[shard][key]) for key, value in other.state[shard].items())


def test_block_numel_is_the_alignment_of_tensors_in_shards() -> None:
    params = [torch.zeros(4, requires_grad=True), torch.zeros(4, requires_grad=True)]
    assert zoptim.AdamW(params).block_numel == 1
    assert zoptim.AdamW(params, state_dtype="8bit").block_numel == 256
    groups = [{"params": params[:1]}, {"params": params[1:], "state_dtype": "8bit"}]
    assert zoptim.AdamW(groups).block_numel == 256


def test_forgotten_plans_keep_nothing_alive() -> None:
    kept, part = torch.zeros(8, requires_grad=True), torch.zeros(8, requires_grad=True)
    optimizer = zoptim.AdamW([kept])
    optimizer.param_groups[0]["params"] = [part]
    part.grad = torch.ones(8)
    optimizer.step()
    gone = weakref.ref(part)
    optimizer.param_groups[0]["params"] = [kept]
    optimizer.state.pop(part)
    del part
    assert gone() is not None
    optimizer.clear_plans()
    assert gone() is None
