"""Merged parts of an attention equal the whole, and so do the parts of its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from zpartition import _compat
from zpartition.sequence import blocks
from zpartition.sequence.blocks import AttentionBlock, attend, attend_backward, merge


@pytest.fixture(params=["fused", "tiles"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "tiles":
        monkeypatch.setattr(_compat, "fused_attention", lambda *_: None)
        monkeypatch.setattr(_compat, "fused_attention_backward", lambda *_: None)
        monkeypatch.setattr(blocks, "TILE", 3)
    return str(request.param)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def worst(pairs: list[tuple[Tensor, Tensor]]) -> float:
    return max(float((a - b).abs().max().detach()) for a, b in pairs)


@pytest.mark.parametrize("heads", [4, 2, 1])
def test_causal_attention_over_two_parts_of_keys(way: str, heads: int) -> None:
    """Queries 5 to 9 look at keys 0 to 4 (all) and at their own (causal)."""
    torch.manual_seed(0)
    q, k, v = (rand(2, count, 10, 3).requires_grad_() for count in (4, heads, heads))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[:, :, 5:]
    upstream = rand(2, 4, 5, 3)
    wanted = torch.autograd.grad(expected, (q, k, v), upstream)
    q, k, v = (each.detach() for each in (q, k, v))
    late, own, before = q[:, :, 5:], (k[:, :, 5:], v[:, :, 5:]), (k[:, :, :5], v[:, :, :5])
    causal, full = AttentionBlock(3**-0.5, is_causal=True), AttentionBlock(3**-0.5)
    out, lse = attend(late, *own, causal)
    merge(out, lse, *attend(late, *before, full))
    first = attend_backward(upstream, (late, *own, out, lse), causal)
    second = attend_backward(upstream, (late, *before, out, lse), full)
    assert worst([(out, expected), (first[0] + second[0], wanted[0][:, :, 5:])]) < 1e-12
    for index in (1, 2):
        assert worst([(first[index], wanted[index][:, :, 5:]), (second[index], wanted[index][:, :, :5])]) < 1e-12


def test_fused_kernels_exist_and_are_as_exact_as_torch() -> None:
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    found = _compat.fused_attention(q, k, v, True, 0.5)
    assert found is not None, "this torch has another kernel: see _compat.fused_attention"
    assert worst([(found[0], scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5))]) < 1e-6
    assert _compat.fused_attention_backward(found[0], (q, k, v, *found), True, 0.5) is not None


def test_queries_without_keys_give_zeros_and_no_nan() -> None:
    q, k, v = (rand(1, 2, 4, 3) for _ in range(3))
    own, other = torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 0, 2, 2]])
    out, lse = attend(q, k, v, AttentionBlock(1.0, query_segments=own, key_segments=other))
    assert bool(out[:, :, 2:].eq(0).all())
    assert bool(lse[:, :, 2:].isinf().all())
    before = out.clone()
    merge(out, lse, torch.zeros_like(out), torch.full_like(lse, -torch.inf))
    assert torch.equal(out, before)
    grads = attend_backward(out, (q, k, v, out, lse), AttentionBlock(1.0, query_segments=own, key_segments=other))
    assert all(bool(grad.isfinite().all()) for grad in grads)
    assert bool(grads[0][:, :, 2:].eq(0).all())
    assert bool(grads[1][:, :, 2:].eq(0).all())


def test_dropout_masks_are_the_same_in_backward() -> None:
    torch.manual_seed(1)
    q, k, v = (rand(1, 2, 7, 3) for _ in range(3))
    block = AttentionBlock(0.7, is_causal=True, dropout=0.4, seed=11)
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    scores = (leaves[0] @ leaves[1].mT * 0.7).masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
    kept = blocks._dropout_mask(scores.detach(), block, 0)
    expected = (scores.softmax(-1) * kept) @ leaves[2]
    upstream = rand(1, 2, 7, 3)
    wanted = torch.autograd.grad(expected, leaves, upstream)
    out, lse = attend(q, k, v, block)
    grads = attend_backward(upstream, (q, k, v, out, lse), block)
    assert worst([(out, expected), *zip(grads, wanted)]) < 1e-12
    assert 0.1 < float((kept == 0).double().mean()) < 0.7


def test_bfloat16_accumulates_in_float32() -> None:
    q, k, v = (torch.randn(1, 2, 8, 4, dtype=torch.bfloat16) for _ in range(3))
    segments = torch.zeros(1, 8, dtype=torch.int64)
    out, lse = attend(q, k, v, AttentionBlock(0.5, query_segments=segments, key_segments=segments))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    wide = scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=0.5)
    assert worst([(out.float(), wide)]) < 0.02
