"""DeepSpeed's DistributedAttention: where the batch is decides where tokens are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import zcomm
from zcomm.testing import run_ranks
from zengine.deepspeed.sequence.layer import DistributedAttention


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
