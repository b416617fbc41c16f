"""Inputs of fully pipelined attention, and the merge of blocks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from zengine.deepspeed.absent import NotAvailable
from zengine.deepspeed.sequence.fpdt_layer import FPDT_Attention, FPDT_InputConstruct, update_out_and_lse


def test_each_rank_has_every_nth_chunk() -> None:
    """The result of DeepSpeed 0.19.8 for 16 tokens, chunks of 8 over 2 ranks."""
    tokens, args = torch.arange(16).view(1, 16), SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=8)
    wanted = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])
    for rank in (0, 1):
        batch = FPDT_InputConstruct(tokens, tokens + 1, tokens, "mask", None, args, 2, rank)
        mine, labels, loss_mask, mask, positions = batch.generate()
        assert (mine.tolist(), labels.tolist()) == ([wanted[rank]], [[token + 1 for token in wanted[rank]]])
        assert loss_mask.tolist() == [wanted[0] + wanted[1]]
        assert (mask, positions) == ("mask", None)
    with pytest.raises(ValueError, match="16 tokens must be a multiple of the chunk size, 6"):
        FPDT_InputConstruct(
            tokens, None, None, None, None, SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=6), 2, 0
        )


def test_blocks_of_keys_are_merged() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 6, 4) for _ in range(3))  # (batch, heads, tokens, width)
    out = lse = None
    for keys, values in zip(k.chunk(2, 2), v.chunk(2, 2)):
        block = scaled_dot_product_attention(q, keys, values).transpose(1, 2)
        weight = (q @ keys.transpose(2, 3) / 2.0).logsumexp(dim=-1)
        out, lse = update_out_and_lse(out, lse, block, weight)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v).transpose(1, 2))
    again, parts = out[:, 2:].clone(), (slice(None), slice(2, None))
    update_out_and_lse(out, lse, again, lse[parts].squeeze(-1).transpose(1, 2), parts)
    torch.testing.assert_close(out[:, 2:], again)
    with pytest.raises(ValueError, match="first block has no slice_"):
        update_out_and_lse(None, None, block, weight, parts)


def test_its_attention_is_absent() -> None:
    with pytest.raises(NotAvailable, match="ring_attention"):
        FPDT_Attention(None)
