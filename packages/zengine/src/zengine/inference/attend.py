"""Causal attention over keys that lie in memory: the rule that recognition tests and that decoding runs."""

from __future__ import annotations

import torch
from torch import Tensor

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
    batch, num_queries, num_heads, size = query.shape
    groups = key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    rows = query.to(wide).view(batch, num_queries, groups, num_heads // groups, size).permute(0, 2, 3, 1, 4)
    keys, values = (each.to(wide).permute(0, 2, 3, 1).unsqueeze(2) for each in (key, value))  # (b, g, 1, size, keys)
    scores = rows @ keys * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    hidden = ~mask[:, None, None]
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1).masked_fill(hidden, 0.0)
    mixed = weights @ values.transpose(-1, -2)  # (b, g, heads of the group, queries, size)
    return mixed.permute(0, 3, 1, 2, 4).reshape(batch, num_queries, num_heads * size).to(query.dtype)
