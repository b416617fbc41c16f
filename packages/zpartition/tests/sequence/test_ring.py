"""Ring attention equals attention in one process, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import zcomm
from zcomm.testing import run_ranks
from zpartition.sequence import Order, Split, ring_attention

LENGTH = 24


def rand(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _worst(order: Order, heads: int, is_causal: bool, packed: bool, dtype: torch.dtype) -> float:
    """Return the largest difference of outputs and gradients."""
    size, rank = zcomm.group_size(), zcomm.group_rank()
    wholes = [rand(seed, 2, count, LENGTH, 5).requires_grad_() for seed, count in enumerate((4, heads, heads))]
    segments = torch.tensor([[0] * 7 + [1] * 11 + [2] * 6, [0] * 24])
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    mask = mask.tril() if is_causal else mask
    if packed:
        mask = mask & (segments.unsqueeze(1) == segments.unsqueeze(2)).unsqueeze(1)
    expected = scaled_dot_product_attention(*wholes, attn_mask=mask, enable_gqa=True)
    upstream = rand(9, *expected.shape)
    expected.backward(upstream)
    split = Split(size, rank, order)
    parts = [split.take(x.detach(), 2).to(dtype).requires_grad_() for x in wholes]
    own = split.take(segments) if packed else None
    out = ring_attention(*parts, is_causal=is_causal, order=order, segments=own)
    out.backward(split.take(upstream, 2).to(dtype))
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(parts, wholes))]
    return max(float((a - split.take(b, 2)).abs().max()) for a, b in pairs)


def _all() -> dict[str, float]:
    found = {}
    for order in Order:
        for heads, is_causal, packed in [(4, True, False), (2, True, True), (1, False, False), (4, False, True)]:
            key = f"{order.name} {heads} {is_causal} {packed}"
            found[key] = _worst(order, heads, is_causal, packed, torch.float64)
    found["float32"] = _worst(Order.ZIGZAG, 2, True, False, torch.float32)
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_outputs_and_gradients_equal_one_process(size: int) -> None:
    for found in run_ranks(_all, size):
        for name, worst in found.items():
            assert worst < (5e-6 if name == "float32" else 1e-12), name


def _kept_and_dropped() -> dict[str, Any]:
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    parts = [torch.randn(1, 2, 64, 4, requires_grad=True) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = ring_attention(*parts, is_causal=True)
    torch.manual_seed(3)  # alike on both ranks
    ones = torch.ones(1, 2, 8, 4, dtype=torch.float64)
    eye = torch.eye(8, dtype=torch.float64).expand(1, 2, 8, 8)
    dropped = ring_attention(ones, ones, eye, dropout_p=0.5)
    torch.manual_seed(3)
    again = ring_attention(ones, ones, eye, dropout_p=0.5)
    for odd, message in [
        ([torch.ones(2, 4, 8)] * 3, r"takes \(batch, heads, tokens, width\)"),
        ([torch.ones(1, 4, 8, 2), torch.ones(1, 3, 8, 2), torch.ones(1, 3, 8, 2)], "a multiple of their heads"),
        ([torch.ones(1, 4, 7, 2)] * 3, "7 tokens must be even"),
        ([torch.ones(1, 4, 8, 2), torch.ones(1, 4, 6, 2), torch.ones(1, 4, 6, 2)], "as many keys as queries"),
    ]:
        with pytest.raises(ValueError, match=message):
            ring_attention(*odd, is_causal=True)
    with pytest.raises(ValueError, match=r"segments of shape \[1, 3\]"):
        ring_attention(ones, ones, ones, segments=torch.zeros(1, 3))
    return {
        "kept": sum(kept),
        "own": out.numel(),
        "again": torch.equal(dropped, again),
        "zeros": float((dropped == 0).double().mean()),
        "mine": dropped.flatten().tolist(),
    }


def test_saved_memory_grows_with_local_tokens_and_masks_are_redrawn() -> None:
    first, second = run_ranks(_kept_and_dropped, 2)
    assert first["kept"] == 4 * first["own"] + first["own"] // 4  # q, k, v, out, lse
    for rank in (first, second):
        assert rank["again"]
    assert first["mine"] != second["mine"]


def test_one_rank_runs_the_attention_itself() -> None:
    q, k, v = (rand(seed, 1, 4, 6, 3) for seed in range(3))
    out = ring_attention(q, k, v, is_causal=True)
    assert float((out - scaled_dot_product_attention(q, k, v, is_causal=True)).abs().max()) < 1e-6
