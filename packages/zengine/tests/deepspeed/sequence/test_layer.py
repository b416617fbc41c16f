"""DeepSpeed's DistributedAttention: where the batch is decides where tokens are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import zcomm
from zcomm.testing import run_ranks
from zengine.deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size_list
from zengine.deepspeed.sequence.layer import (
    DistributedAttention,
    _dim_zero_all_to_all,
    _SeqAllToAll,
    apply_rotary_pos_emb,
    single_all_to_all,
)


def batch_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(batch, tokens, heads, width)."""
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    return scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)


def tokens_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return batch_first(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1)


def _worst() -> list[float]:
    rank, found = zcomm.group_rank(), []
    for batch_dim, attention in ((0, batch_first), (1, tokens_first)):
        whole = [torch.randn(6, 6, 4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
        part = [x.chunk(2, 1 - batch_dim)[rank] for x in whole]
        out = DistributedAttention(attention, None, sp_stream=object())(*part, batch_dim)
        found.append(float((out - attention(*whole).chunk(2, 1 - batch_dim)[rank]).abs().max()))
    with pytest.raises(ValueError, match=r"batch_dim_idx must be .* got 2"):
        DistributedAttention(batch_first, None)(*part, 2)
    return found


def test_both_layouts_are_attended_to_as_the_whole() -> None:
    for found in run_ranks(_worst, 2):
        assert max(found) < 1e-6


def _exchange(heads: int, kv_heads: int, batch_dim: int) -> None:
    """Check the exchange with a tensor whose numbers are their own places."""
    group, rank, tokens = None, zcomm.group_rank(), 1 - batch_dim
    whole = torch.arange(2 * 6 * heads * 3, dtype=torch.float32).view(2, 6, heads, 3).movedim(0, batch_dim)
    mine = whole.chunk(2, tokens)[rank].contiguous().requires_grad_()
    sizes = [size * heads // kv_heads for size in get_shard_size_list(kv_heads, 2, AutoTPMeta(num_kv_heads=kv_heads))]
    to_heads = _SeqAllToAll.apply(group, mine, 2, tokens, batch_dim, None, None, None, True, kv_heads)
    assert torch.equal(to_heads, whole.split(sizes, 2)[rank])
    back = _SeqAllToAll.apply(group, to_heads, tokens, 2, batch_dim, None, None, None, True, kv_heads)
    assert torch.equal(back, mine)
    (back * mine.detach()).sum().backward()
    assert torch.equal(mine.grad, mine.detach())
    if heads % 2 == 0 and heads == kv_heads:
        assert torch.equal(single_all_to_all(to_heads.detach(), tokens, 2, batch_dim, group), mine)


def _exchanges() -> None:
    for heads, kv_heads in ((4, 4), (3, 3), (6, 3), (14, 7)):
        for batch_dim in (0, 1):
            _exchange(heads, kv_heads, batch_dim)
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(zcomm.group_rank()), requires_grad=True)
    swapped = _dim_zero_all_to_all(None, x)
    assert torch.equal(_dim_zero_all_to_all(None, swapped), x)
    swapped.sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 5))
    for call, told in (
        (
            lambda: single_all_to_all(torch.ones(2, 6, 1, 3), 2, 1, 0, None),
            "1 key-value heads cannot be assigned to 2",
        ),
        (lambda: single_all_to_all(torch.ones(2, 5, 2, 3), 1, 2, 0, None), "5 tokens .* cannot be split over 2"),
        (lambda: single_all_to_all(torch.ones(2, 6, 2, 3), 2, 1, 3, None), "batch_dim_idx must be 0"),
        (lambda: _dim_zero_all_to_all(None, torch.ones(3, 2)), "must be the number of ranks, 2"),
    ):
        with pytest.raises(ValueError, match=told):
            call()


def test_heads_and_tokens_are_exchanged_even_if_heads_do_not_divide() -> None:
    run_ranks(_exchanges, 2)


def test_positions_rotate_queries_and_keys() -> None:
    angle = torch.arange(5.0).view(1, 5, 1, 1).expand(1, 5, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    q, k, v = (torch.randn(5, 2, 3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    out = DistributedAttention(tokens_first, None)(q, k, v, 1, (cos, sin))
    turned = [apply_rotary_pos_emb(x, cos.permute(1, 0, 2, 3), sin.permute(1, 0, 2, 3)) for x in (q, k)]
    torch.testing.assert_close(out, tokens_first(*turned, v))
    assert torch.equal(turned[0][..., 2:], q[..., 2:])
    pair = q[3, 0, 0, :2]
    rotation = torch.tensor([[cos[0, 3, 0, 0], -sin[0, 3, 0, 0]], [sin[0, 3, 0, 0], cos[0, 3, 0, 0]]])
    torch.testing.assert_close(turned[0][3, 0, 0, :2], rotation @ pair)
