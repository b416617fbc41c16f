"""Optimizers that look at shapes, on shards: positions and states, at world size 1 and on ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy
from zpartition.layout.layout import ParamSpec, plan_layout
from zpartition.state.shape_aware import ShardRanks, cuts_of

SHAPES = {"a": (50, 40), "b": (7,), "c": (), "d": (30, 90)}


class RowNorm(torch.optim.Optimizer):
    """Divides each row of a matrix by its norm over all steps, which it keeps; vectors move by their gradient.

    The smallest optimizer that looks at shapes, keeps state of another shape, and can be told of cuts.
    """

    elementwise = False

    def __init__(self, params: Any) -> None:
        self.layout: dict[torch.Tensor, list[Any]] = {}
        super().__init__(params, {"lr": 0.1})

    def place_on_ranks(self, segments: Mapping[torch.Tensor, Sequence[Sequence[Any]]], ranks: Any) -> None:
        self.layout = {shard: by_rank[ranks.rank] for shard, by_rank in segments.items()}
        self.ranks = ranks
        self.num_tensors = 1 + max(cut.index for found in segments.values() for cuts in found for cut in cuts)

    def new_state(self, shard: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if shard not in self.layout:
            return None
        rows = sum(cut.shape[0] for cut in self.layout[shard] if len(cut.shape) == 2)
        return {
            "step": torch.zeros(len(self.layout[shard])),
            "sums": torch.zeros(rows),
            "last": torch.zeros(shard.numel()),
        }

    def segment_states(
        self, shard: torch.Tensor, state: Mapping[str, torch.Tensor]
    ) -> list[dict[str, torch.Tensor]] | None:
        if shard not in self.layout:
            return None
        found, row = [], 0
        for cut, step in zip(self.layout[shard], state["step"]):
            numel = cut.span[1] - cut.span[0]
            part = {"step": step, "last": state["last"][cut.start : cut.start + numel]}
            if len(cut.shape) == 2:
                part["sums"] = state["sums"][row : row + cut.shape[0]].view(-1, 1)
                row += cut.shape[0]
            found.append(part)
        return found

    def _whole(self, param: torch.Tensor) -> None:
        state = self.state[param]
        if not state:
            state.update(step=torch.zeros(()), last=torch.zeros_like(param))
            if param.dim() == 2:
                state["sums"] = torch.zeros(param.size(0), 1)
        state["step"] += 1
        state["last"].copy_(param.grad)
        if param.dim() == 2:
            state["sums"] += param.grad.square().sum(1, keepdim=True)
            param.data -= 0.1 * param.grad / (state["sums"] + 1e-12).sqrt()
        else:
            param.data -= 0.1 * param.grad

    def _cut(self, sums: torch.Tensor, shard: torch.Tensor, apply: bool) -> None:
        state = self.state[shard]
        for cut, part in zip(self.layout[shard], self.segment_states(shard, state) or ()):
            here = slice(cut.start, cut.start + cut.span[1] - cut.span[0])
            grad = shard.grad[here]
            step = grad
            if "sums" in part:
                rows = torch.arange(*cut.span) // cut.shape[1]
                if not apply:
                    sums[cut.index].index_add_(0, rows, grad.double().square())
                    continue
                if (cut.index, "added") not in self.seen:
                    self.seen.add((cut.index, "added"))
                    part["sums"] += sums[cut.index, : cut.shape[0], None].float()
                step = grad / (part["sums"][rows, 0] + 1e-12).sqrt()
            if apply:
                part["last"].copy_(grad)
                shard.data[here] -= 0.1 * step

    @torch.no_grad()
    def step(self) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.seen: set[Any] = set()
        for param in params:
            if param not in self.layout:
                self._whole(param)
        mine = [param for param in params if param in self.layout]
        if not mine:
            return
        for shard in mine:
            if not self.state[shard]:
                self.state[shard].update(self.new_state(shard) or {})
            self.state[shard]["step"] += 1
        sums = torch.zeros(self.num_tensors, 256, dtype=torch.float64)
        for shard in mine:
            self._cut(sums, shard, apply=False)
        self.ranks.all_reduce(sums)
        for shard in mine:
            self._cut(sums, shard, apply=True)


class Net(nn.Module):
    """Matrices and a vector that spans of 1024 elements cut, and a part that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(30, 90)
        self.rest = nn.Sequential(nn.Tanh(), nn.Linear(90, 40), nn.Tanh(), nn.Linear(40, 3))
        self.spare = nn.Linear(30, 130)

    def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        return self.rest(self.first(x)).square().mean() + (self.spare(x).square().mean() if spare else 0.0)


def train(model: nn.Module, finish: Any, steps: Sequence[bool]) -> None:
    generator = torch.Generator().manual_seed(1)
    for spare in steps:
        model(torch.randn(8, 30, generator=generator), spare).backward()
        finish()


def alone(steps: Sequence[bool], before: Sequence[bool] = ()) -> tuple[Net, RowNorm]:
    model = Net()
    optimizer = RowNorm(model.parameters())

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad()

    train(model, finish, before)
    train(model, finish, steps)
    return model, optimizer


def partitioned(
    stage: int, steps: Sequence[bool], before: Sequence[bool] = (), half: bool = False, shard_group_size: int = 0
) -> Any:
    model, optimizer = alone(before)
    if half:
        model = model.bfloat16()
    sizes = {"bucket_numel": 6000, "unit_numel": 2000, "persist_numel": 0, "max_live_numel": 0}
    policy = ZeroPolicy(stage=stage, shard_group_size=shard_group_size, **sizes)
    partition = zpartition.shard(model, optimizer, policy=policy)
    generator = torch.Generator().manual_seed(1)
    for spare in steps:
        with partition.micro_step():
            x = torch.randn(8, 30, generator=generator)
            model(x.bfloat16() if half else x, spare).backward()
        partition.finish_gradients()
        partition.apply(optimizer.step, any_unused=partition.num_unused() > 0)
        partition.zero_grad()
    return partition, optimizer


def states_of(partition: Any, optimizer: Any) -> dict[Any, Any]:
    shards = zpartition.state_shards(optimizer, partition.holders)
    return {(key, s.name): (s.global_shape, s.span, s.tensor.clone()) for key, s in shards}


def check_stages(before: Sequence[bool], steps: Sequence[bool], shard_group_size: int = 0) -> list[str]:
    """Every stage trains as one process does, with the state that one process has."""
    model, whole = alone(steps, before)
    report = []
    for stage in (1, 2, 3):
        partition, optimizer = partitioned(stage, steps, before, shard_group_size=shard_group_size)
        states = states_of(partition, optimizer)
        for key, name in states:
            shape, span, value = states[key, name]
            expected = whole.state[dict(model.named_parameters())[name]][key]
            assert shape == tuple(expected.shape), (stage, key, name)
            torch.testing.assert_close(value, expected.reshape(-1)[slice(*span)], rtol=1e-5, atol=1e-8)
        partition.close()
        for (name, ours), theirs in zip(partition.module.named_parameters(), model.parameters()):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        report.append(f"stage {stage}: {len(states)} states")
    return report


def test_every_stage_steps_as_one_process_does_with_the_same_state():
    for reports in run_ranks(check_stages, 2, [], [True, True, True]):
        assert len(reports) == 3
    check_stages([], [True, True])


def test_in_hybrid_sharding_cuts_are_those_of_a_shard_group():
    run_ranks(check_stages, 4, [], [True, True], 2)


def test_parameters_that_no_rank_used_keep_weights_and_state_of_every_shape():
    run_ranks(check_unused, 2)


def check_unused() -> None:
    partition, optimizer = partitioned(2, [True, False, False])
    early, first = partitioned(2, [True])
    after, before = states_of(partition, optimizer), states_of(early, first)
    spare = [key for key in before if key[1].startswith("spare")]
    assert {key for key, _ in spare} >= {"last", "step"}
    for key in spare:
        assert torch.equal(after[key][2], before[key][2]), key
    for ours, theirs in zip(partition.shards(), early.shards()):
        if ours.name.startswith("spare"):
            assert torch.equal(ours.tensor, theirs.tensor)


def test_state_from_before_the_partition_moves_along():
    run_ranks(check_stages, 2, [True, True], [True])


def test_parameters_that_share_a_shard_keep_their_own_step_counts():
    states = states_of(*partitioned(0, [False], [True, False], half=True))
    counts = {name: int(value) for (key, name), (_, _, value) in states.items() if key == "step"}
    assert {name: count for name, count in counts.items() if name.startswith("spare")} == {
        "spare.weight": 1,
        "spare.bias": 1,
    }
    assert {count for name, count in counts.items() if not name.startswith("spare")} == {3}


def test_masters_that_lie_apart_are_laid_out_at_stage_0_too():
    partition, optimizer = partitioned(0, [True], half=True)
    assert not partition.updates_parameters
    assert {p.dim() for group in optimizer.param_groups for p in group["params"]} == {1}
    assert states_of(partition, optimizer)["sums", "first.weight"][0] == (90, 1)
    weight = partition.params["first.weight"]
    assert zpartition.safe_get_full_optimizer_state(weight, "last").shape == weight.shape
    with pytest.raises(ValueError, match=r"state 'sums' of RowNorm has no value for each element .* state_shards\("):
        zpartition.safe_get_full_optimizer_state(weight, "sums")
    whole, _ = partitioned(0, [True])
    assert whole.updates_parameters, "and where nothing is cut the optimizer has the parameters"


def test_the_cuts_of_all_ranks_cover_every_tensor_once():
    specs = [ParamSpec(name, shape, torch.float32) for name, shape in SHAPES.items()]
    layout = plan_layout(specs, world_size=4, num_shards=4, bucket_numel=3000)
    cuts = [cut for by_rank in cuts_of(layout) for found in by_rank for cut in found]
    for index, (_, slot) in enumerate(layout.slots()):
        mine = sorted(cut.span for cut in cuts if cut.index == index)
        assert mine[0][0] == 0
        assert mine[-1][1] == slot.numel
        assert all(a[1] == b[0] for a, b in itertools.pairwise(mine))
        assert {cut.shape for cut in cuts if cut.index == index} == {SHAPES[slot.name]}
    assert any(cut.span[1] - cut.span[0] < torch.Size(cut.shape).numel() for cut in cuts)


def _exchange() -> list[float]:
    rank = zcomm.group_rank()
    ranks = ShardRanks(None, rank, 3, torch.device("cpu"))
    numels = [[0, 2, 1], [3, 0, 0], [0, 0, 1]]
    given = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0]][rank]
    total = torch.tensor([float(rank)])
    ranks.all_reduce(total)
    return [*ranks.exchange(torch.tensor(given), numels).tolist(), *total.tolist()]


def test_ranks_exchange_slices_of_any_size():
    assert run_ranks(_exchange, 3) == [[4.0, 5.0, 6.0, 3.0], [1.0, 2.0, 3.0], [3.0, 7.0, 3.0]]


def test_nothing_is_sent_where_nothing_is_cut():
    ranks = ShardRanks(None, 0, 1, torch.device("cpu"))
    kept = torch.ones(2)
    ranks.all_reduce(kept)
    assert kept.tolist() == [1.0, 1.0]
