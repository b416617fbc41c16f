"""Token dispatch: destinations and order of rows, and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import zcomm
from zcomm.testing import run_ranks
from zpartition.experts.dispatch import TokenDispatch
from zpartition.layout.model_parallel import ALONE, ModelParallelGroup

EXPERTS = 4


def routing(rank: int, tokens: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, experts, kept, weights of a rank; no token chooses expert 1, rank 1 sends none to experts 0 and 1."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, 3, generator=generator, dtype=torch.float64)
    allowed = torch.tensor([0, 2, 3] if rank == 0 else [2, 3])
    experts = allowed[torch.randint(len(allowed), (tokens, 2), generator=generator)]
    kept = torch.rand(tokens, 2, generator=generator) > 0.3
    weights = torch.rand(tokens, 2, generator=generator, dtype=torch.float64) * kept
    return x, experts, kept, weights


def expected(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute output and gradients of x and weights by masks, where expert e multiplies by e + 1."""
    x, experts, _, weights = routing(rank)
    x.requires_grad_()
    weights.requires_grad_()
    y = (weights[..., None] * (experts + 1)[..., None] * x[:, None]).sum(1)
    return (y.detach(), *torch.autograd.grad(y.square().sum(), (x, weights)))


def shipped(expert_group: ModelParallelGroup) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    x, experts, kept, weights = routing(zcomm.group_rank())
    x.requires_grad_()
    weights.requires_grad_()
    dispatch = TokenDispatch.plan(experts, kept, EXPERTS, expert_group)
    rows = dispatch.send(x)
    numbers = torch.arange(EXPERTS)[dispatch.own].repeat_interleave(torch.tensor(dispatch.counts))
    y = dispatch.combine(rows * (numbers + 1)[:, None], weights)
    return (y.detach(), *torch.autograd.grad(y.square().sum(), (x, weights)), dispatch.counts)


def check(found: tuple[Tensor, Tensor, Tensor, list[int]], rank: int) -> None:
    kept = routing(rank)[2]
    y, x_grad, weight_grad = expected(rank)
    torch.testing.assert_close(found[0], y)
    torch.testing.assert_close(found[1], x_grad)
    torch.testing.assert_close(found[2], weight_grad * kept)


def test_one_rank_sorts_rows_and_restores_their_order() -> None:
    found = shipped(ALONE)
    check(found, 0)
    x, experts, kept, _ = routing(0)
    rows = TokenDispatch.plan(experts, kept, EXPERTS, ALONE).send(x)
    pairs = [(int(experts[t, j]), t, j) for t in range(6) for j in range(2) if kept[t, j]]
    assert torch.equal(rows, x[[t for _, t, _ in sorted(pairs)]])
    assert found[3][1] == 0


def _traced() -> tuple[tuple[Tensor, Tensor, Tensor, list[int]], list[tuple[str, int]]]:
    log: list[zcomm.Record] = []
    expert_group = ModelParallelGroup.of(None)
    with zcomm.traced(log):
        found = shipped(expert_group)
    return found, [(record.op, record.numel) for record in log]


@pytest.mark.parametrize("world_size", [2, 4])
def test_sharded_experts_equal_local_ones(world_size: int) -> None:
    answers = run_ranks(_traced, world_size)
    for rank, (found, _) in enumerate(answers):
        check(found, rank)
    kept = sum(int(routing(rank)[2].sum()) for rank in range(world_size))
    assert sum(sum(found[3]) for found, _ in answers) == kept  # what was dropped does not travel
    assert len({tuple(op for op, _ in log) for _, log in answers}) == 1
    assert answers[0][1][0][0] == "all_gather"  # the counts
    assert len(answers[0][1]) == 5  # and two exchanges forward, two backward


def _nothing() -> bool:
    """No rank has tokens: backward still runs all exchanges."""
    expert_group = ModelParallelGroup.of(None)
    x = torch.randn(5, 3, requires_grad=True)
    experts = torch.zeros(5, 1, dtype=torch.int64)
    dispatch = TokenDispatch.plan(experts, torch.zeros(5, 1, dtype=torch.bool), EXPERTS, expert_group)
    y = dispatch.combine(dispatch.send(x), torch.zeros(5, 1))
    y.sum().backward()
    assert x.grad is not None
    return not y.any() and not x.grad.any()


def test_ranks_without_tokens_join_the_exchanges() -> None:
    assert run_ranks(_nothing, 2) == [True, True]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_gradients_of_sums_match_finite_differences(k: int) -> None:
    """One, two and three choices per token, which have separate code paths; some are dropped."""
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(5, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(5, k, generator=generator, dtype=torch.float64, requires_grad=True)
    experts = torch.rand(5, EXPERTS, generator=generator).argsort(1)[:, :k]
    kept = torch.rand(5, k, generator=generator) > 0.3

    def layer(x: Tensor, weights: Tensor) -> Tensor:
        dispatch = TokenDispatch.plan(experts, kept, EXPERTS, ALONE)
        return dispatch.combine(dispatch.send(x).tanh(), weights * kept)

    assert torch.autograd.gradcheck(layer, (x, weights))
