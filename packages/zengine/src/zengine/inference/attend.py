"""Causal attention over keys that lie in memory: the rule that recognition tests and that decoding runs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["attend", "causal_mask"]


def causal_mask(query_positions: Tensor, key_positions: Tensor, window: int = 0) -> Tensor:
    """Return (..., queries, keys) bool: True where a query sees a key.

    query_positions: (..., queries); key_positions: (..., keys), negative where there is no key.
    window: positions that a query sees, its own included; 0: all before it.
    """
    distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)
    seen = (distance >= 0) & (key_positions >= 0).unsqueeze(-2)
    return seen & (distance < window) if window else seen


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float, softcap: float = 0.0) -> Tensor:
    """Return (batch, queries, heads * size) in the dtype of `query`; scores and sums are float32 or wider.

    query: (batch, queries, heads, size); key, value: (batch, keys, kv heads, size), each for the heads // kv heads
    query heads of its group; mask: (batch or 1, queries, keys) bool.  A query that sees no key gives zeros.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    queries, keys, values = (each.to(wide).transpose(1, 2) for each in (query, key, value))
    if softcap:
        mixed = _attend_capped(queries, keys, values, mask, scale=scale, softcap=softcap)
    else:  # the scores of a prompt are never written to memory
        mixed = scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask[:, None], scale=scale, enable_gqa=True
        )
    return mixed.transpose(1, 2).flatten(2).to(query.dtype)


def _attend_capped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float, softcap: float
) -> Tensor:
    """Return (batch, heads, queries, size); query: of that shape; key, value: (batch, kv heads, keys, size)."""
    rows = query.reshape(query.shape[0], key.shape[1], -1, *query.shape[2:])
    keys, values = (each.transpose(-1, -2).unsqueeze(2) for each in (key, value))  # (b, g, 1, size, keys)
    scores = torch.tanh(rows @ keys * scale / softcap) * softcap
    hidden = ~mask[:, None, None]
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1).masked_fill(hidden, 0.0)
    return (weights @ values.transpose(-1, -2)).flatten(1, 2)
