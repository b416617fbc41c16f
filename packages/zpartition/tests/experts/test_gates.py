"""Gates against the formulas of the papers, written out with masks and running sums, and against numbers by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from zpartition.experts.gates import Routing, capacity_of, dense_mask, top1, top2, topk, update_bias

TOKENS, EXPERTS = 40, 5


def logits(seed: int = 0) -> Tensor:
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def masked(chosen: Tensor) -> Tensor:
    return one_hot(chosen, EXPERTS).double()


def normalised(gates: Tensor) -> Tensor:
    return gates / gates.sum(1, keepdim=True).clamp(min=torch.finfo(gates.dtype).eps)


def check(routing: Routing, weights: Tensor, aux_loss: Tensor, counts: Tensor) -> None:
    torch.testing.assert_close(dense_mask(routing, EXPERTS), weights)
    torch.testing.assert_close(routing.aux_loss, aux_loss)
    assert routing.counts.tolist() == counts.long().tolist()
    assert torch.equal(routing.weights > 0, routing.kept)


def test_capacity_is_the_fair_share_times_the_factor_but_not_below_the_minimum() -> None:
    assert capacity_of(100, 8, 1, 1.0, 4) == 13
    assert capacity_of(100, 8, 2, 1.25, 4) == 32  # 100 / 8 * 2.5 = 31.25
    assert capacity_of(10, 8, 1, 1.0, 4) == 4
    assert capacity_of(10, 8, 1, 1.0, 0) == 2


@pytest.mark.parametrize("capacity", [None, 6])
def test_top1_matches_switch(capacity: int | None) -> None:
    """Fedus et al. 2022, section 2.2: weight p_i of the best expert, alpha-free loss N * sum f_i P_i."""
    gates = logits().softmax(1)
    mask = masked(gates.argmax(1))
    loss = (gates.mean(0) * mask.mean(0)).sum() * EXPERTS
    place = mask.cumsum(0) - 1
    kept = mask if capacity is None else mask * (place < capacity)
    check(top1(logits(), capacity=capacity), gates * kept, loss, mask.sum(0))


def test_top1_keeps_the_highest_priority_and_noise_changes_only_the_choice() -> None:
    priority = torch.rand(TOKENS, generator=torch.Generator().manual_seed(3))
    routing = top1(logits(), capacity=3, priority=priority)
    chosen = logits().argmax(1)
    for expert in range(EXPERTS):
        wanting = [t for t in range(TOKENS) if chosen[t] == expert]
        best = sorted(wanting, key=lambda t: -float(priority[t]))[:3]
        assert [t for t in wanting if routing.kept[t, 0]] == sorted(best)
    noisy = top1(logits(), noise=logits(1))
    assert torch.equal(noisy.experts[:, 0], (logits() + logits(1)).argmax(1))
    torch.testing.assert_close(noisy.weights, logits().softmax(1).gather(1, noisy.experts))


def test_padding_is_not_routed_or_counted() -> None:
    used = torch.arange(TOKENS) % 3 > 0
    for routing in (top1(logits(), capacity=4, used=used), top2(logits(), used=used), topk(logits(), 3, used=used)):
        assert not routing.kept[~used].any()
        assert routing.weights[~used].abs().sum() == 0
        assert routing.counts.sum() == used.sum() * routing.experts.shape[1]


@pytest.mark.parametrize("capacity", [None, 9])
@pytest.mark.parametrize("noise", [None, 7])
def test_top2_matches_gshard(capacity: int | None, noise: int | None) -> None:
    """Lepikhin et al. 2021, algorithm 1: all first choices precede second ones; the loss counts first ones."""
    gates, noise_values = logits().softmax(1), None if noise is None else logits(noise)
    mask1 = masked(gates.argmax(1))
    second = logits() if noise_values is None else logits() + noise_values
    mask2 = masked(second.masked_fill(mask1.bool(), -torch.inf).argmax(1))
    loss = (gates.mean(0) * mask1.mean(0)).mean() * EXPERTS**2
    counts = (mask1 + mask2).sum(0)
    if capacity is not None:
        place1, place2 = mask1.cumsum(0) - 1, mask2.cumsum(0) - 1 + mask1.sum(0)
        mask1, mask2 = mask1 * (place1 < capacity), mask2 * (place2 < capacity)
    weights = normalised(gates * (mask1 + mask2))
    check(top2(logits(), capacity=capacity, noise=noise_values), weights, loss, counts)


@pytest.mark.parametrize("capacity", [None, 14])
def test_topk_keeps_the_largest_logits(capacity: int | None) -> None:
    gates = logits().softmax(1)
    chosen = logits().topk(3, dim=1).indices
    mask = masked(chosen).sum(1)
    loss = (gates.mean(0) * mask.mean(0)).mean() * EXPERTS**2 / 3
    counts = mask.sum(0)
    if capacity is not None:
        wanted_logits = logits().masked_fill(mask == 0, -torch.inf)
        best = torch.zeros_like(mask).scatter(0, wanted_logits.topk(capacity, dim=0).indices, 1.0)
        mask = mask * best
    check(topk(logits(), 3, capacity=capacity), normalised(gates * mask), loss, counts)


def test_topk_by_position_keeps_the_first_tokens() -> None:
    """By choice, then by position, as top2 does for two choices."""
    first, second = topk(logits(), 2, capacity=9, by_position=True), top2(logits(), capacity=9)
    assert torch.equal(first.kept, second.kept)
    torch.testing.assert_close(first.weights, second.weights)


def test_a_bias_changes_the_choice_but_no_weight_and_balances() -> None:
    values = logits() + torch.tensor([3.0, 1.0, 0.0, 0.0, -1.0])
    routing = topk(values, 1, bias=torch.tensor([-9.0, 0.0, 0.0, 0.0, 0.0]))
    assert routing.counts[0] == 0
    torch.testing.assert_close(routing.weights, values.softmax(1).gather(1, routing.experts))  # k=1: no normalisation
    bias = torch.zeros(EXPERTS, dtype=values.dtype)
    for _ in range(150):
        bias = update_bias(bias, topk(values, 1, bias=bias).counts, 0.01)
    assert topk(values, 1).counts.max() >= 24
    assert topk(values, 1, bias=bias).counts.max() <= 10  # the mean is 8
    assert update_bias(torch.zeros(3), torch.tensor([1, 2, 3]), 0.5).tolist() == [0.5, 0.0, -0.5]


def test_gates_are_differentiable_in_weights_and_loss() -> None:
    for route in (top1, top2, lambda x: topk(x, 3)):
        values = logits().requires_grad_()
        routing = route(values)
        (routing.weights.square().sum() + routing.aux_loss).backward()
        assert values.grad is not None
        assert values.grad.abs().sum() > 0
