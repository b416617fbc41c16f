"""The gate as a module: which rule is used when, and its noise."""

from __future__ import annotations

import pytest
import torch

from zpartition.experts.gates import top1, top2, topk
from zpartition.experts.router import JITTER, Router, RoutingRule


def made(**options: object) -> Router:
    torch.manual_seed(0)
    return Router(6, 4, RoutingRule(**options))  # type: ignore[arg-type]


X = torch.randn(20, 6, generator=torch.Generator().manual_seed(2))


def test_k_selects_the_gate_and_the_mode_the_capacity() -> None:
    router = made(k=2, capacity_factor=0.5, eval_capacity_factor=4.0, second="best", min_capacity=1)
    logits = X @ router.weight.t()
    assert torch.equal(router(X).kept, top2(logits, capacity=5).kept)
    assert bool(router.eval()(X).kept.all())
    assert torch.equal(made(k=3, drops=False)(X).experts, topk(logits, 3).experts)
    assert made(drops=False).capacity(1000) is None
    assert made(min_capacity=7).capacity(4) == 7


def test_random_priority_drops_random_tokens_and_evaluation_has_no_noise() -> None:
    router = made(capacity_factor=0.5, min_capacity=0)
    by_position = made(capacity_factor=0.5, min_capacity=0, priority="position")(X)
    found = [router(X).kept for _ in range(4)]
    assert any(not torch.equal(kept, by_position.kept) for kept in found)
    assert all(kept.sum() == by_position.kept.sum() for kept in found)
    for options in ({"noise": "RSample", "drops": False}, {"k": 2}, {"noise": "Jitter", "drops": False}):
        router = made(**options).eval()
        assert torch.equal(router(X).experts, router(X).experts)
        assert torch.equal(router(X).weights, router(X).weights)


def test_rsample_draws_experts_by_their_probabilities() -> None:
    """Gumbel's trick: the frequencies are the softmax."""
    router = made(noise="RSample", drops=False)
    x = X[:1].expand(20_000, 6)
    counts = router(x).counts / 20_000
    torch.testing.assert_close(counts, (X[:1] @ router.weight.t()).softmax(1)[0].detach(), atol=0.015, rtol=0)


def test_jitter_changes_probabilities_slightly() -> None:
    router = made(noise="Jitter", drops=False, priority="position")
    plain = top1(X @ router.weight.t())
    assert not torch.equal(router(X).weights, plain.weights)
    torch.testing.assert_close(router(X).weights, plain.weights, atol=10 * JITTER, rtol=0)


def test_it_computes_in_float32_under_autocast_and_for_bfloat16() -> None:
    router = made(drops=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(router(X).weights, router(X).weights)
        assert router(X).weights.dtype == torch.float32
    assert router.to(torch.bfloat16)(X.to(torch.bfloat16)).weights.dtype == torch.float32


def test_the_bias_is_saved_and_loads_accumulate_in_training() -> None:
    router = made(k=2)
    router.balance_by_bias(0.1)
    assert set(router.state_dict()) == {"weight", "bias"}
    routing = router(X)
    router.eval()(X)
    assert router.load.tolist() == routing.counts.tolist()


def test_unused_noise_raises() -> None:
    with pytest.raises(ValueError, match="'RSample' samples the one expert of a top-1 gate, and k is 2"):
        RoutingRule(k=2, noise="RSample")
    with pytest.raises(ValueError, match="noise"):
        RoutingRule(noise="Rsample")
