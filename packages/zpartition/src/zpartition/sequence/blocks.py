"""Blockwise attention: partial attention of some queries over some keys, which a ring merges.

`attend` also returns the log-sum-exp of each query's scores (lse), by which parts over different keys are merged into
the result of one softmax over all of them (Milakov and Gimelshein 2018; `merge`).  The gradients of a part need only
the final output and lse: probabilities are recomputed as exp(score - lse) (Dao et al. 2022, algorithm 4), so nothing
quadratic is kept.

Torch's own kernels do both where they can (`_compat.fused_attention`).  Otherwise scores exist for `TILE` queries at
a time.
"""

from __future__ import annotations

import math
from typing import final

import attrs
import torch
from torch import Tensor

from zpartition import _compat

__all__ = ["Attended", "AttentionBlock", "attend", "attend_backward", "merge"]

# q, k, v, and the output and lse of these queries over all keys, including those of other blocks
Attended = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

TILE = 256  # queries whose scores exist at a time


@final
@attrs.frozen(eq=False)
class AttentionBlock:
    """Attention of a run of queries over a run of keys."""

    scale: float
    is_causal: bool = False  # query i at keys 0 to i; otherwise at all
    query_segments: Tensor | None = None  # (batch, queries) integers: a query sees keys of the same segment only
    key_segments: Tensor | None = None  # (batch, keys)
    dropout: float = 0.0  # of probabilities
    seed: int = 0  # of the mask; another one for each block

    @property
    def is_plain(self) -> bool:
        """True if a fused kernel supports it."""
        return self.query_segments is None and not self.dropout


def attend(q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """Return (output shaped as q, lse (batch, heads, queries) of at least float32).

    lse is -inf for a query without keys.

    q: (batch, heads, queries, width).
    k, v: (batch, heads or a divisor of them, keys, width).
    """
    if block.is_plain and (found := _compat.fused_attention(q, k, v, block.is_causal, block.scale)):
        return found
    out, lses = q.new_empty(*q.shape[:3], v.shape[3]), []
    for start in range(0, q.shape[2], TILE):
        tile = slice(start, start + TILE)
        scores = _scores(q[:, :, tile], k, block, start)
        lse = scores.logsumexp(-1)
        probabilities = (scores - _finite(lse).unsqueeze(-1)).exp_()
        if block.dropout:
            probabilities *= _dropout_mask(probabilities, block, start)
        out[:, :, tile] = _times(probabilities.to(v.dtype), v)
        lses.append(lse)
    return out, torch.cat(lses, -1)


def attend_backward(grad: Tensor, attended: Attended, block: AttentionBlock) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v through this block; grad: of the output."""
    if block.is_plain and (found := _compat.fused_attention_backward(grad, attended, block.is_causal, block.scale)):
        return found
    q, k, v, out, lse = attended
    wide = lse.dtype
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    inner = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    for start in range(0, q.shape[2], TILE):
        tile = slice(start, start + TILE)
        there, grads = q[:, :, tile], grad[:, :, tile].to(wide)
        probabilities = (_scores(there, k, block, start) - _finite(lse[:, :, tile]).unsqueeze(-1)).exp_()
        kept = _dropout_mask(probabilities, block, start) if block.dropout else 1.0
        dv += _times_transposed(probabilities * kept, grads, v.shape[1])
        grad_scores = _times(grads, v.to(wide).mT) * kept - inner[:, :, tile]
        grad_scores *= probabilities * block.scale
        dq[:, :, tile] = _times(grad_scores, k.to(wide))
        dk += _times_transposed(grad_scores, there.to(wide), k.shape[1])
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge the other part into `out` and `lse`, in place; shapes as `attend` returns them."""
    joint = torch.logaddexp(lse, more_lse)
    safe = _finite(joint)
    out.mul_((lse - safe).exp_().unsqueeze(-1)).add_(more * (more_lse - safe).exp_().unsqueeze(-1))
    lse.copy_(joint)


def _scores(q: Tensor, k: Tensor, block: AttentionBlock, start: int) -> Tensor:
    """(batch, heads, queries of a tile, keys), -inf where masked; at least float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = _times(q.to(wide), k.to(wide).mT).mul_(block.scale)
    if block.is_causal:
        behind = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(start + 1)
        scores.masked_fill_(behind, -math.inf)
    if block.query_segments is not None and block.key_segments is not None:
        own = block.query_segments[:, start : start + q.shape[2], None] == block.key_segments[:, None, :]
        scores.masked_fill_(~own.unsqueeze(1), -math.inf)
    return scores


def _times(x: Tensor, y: Tensor) -> Tensor:
    """x @ y, (batch, heads, a, b) by (batch, fewer heads, b, c)."""
    if x.shape[1] == y.shape[1]:
        return x @ y
    return (_group_heads(x, y.shape[1]) @ y.unsqueeze(2)).flatten(1, 2)


def _times_transposed(x: Tensor, y: Tensor, heads: int) -> Tensor:
    """x^T @ y, (batch, all heads, a, b) by (batch, all heads, a, c), summed over query heads of each of `heads`."""
    product = x.mT @ y
    return product if heads == x.shape[1] else _group_heads(product, heads).sum(2)


def _group_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, all heads, a, b) -> (batch, heads, query heads of each, a, b)."""
    return x.reshape(x.shape[0], heads, -1, *x.shape[2:])


def _dropout_mask(like: Tensor, block: AttentionBlock, start: int) -> Tensor:
    """Dropout factors of the probabilities: 0, or 1 / (1 - dropout)."""
    generator = torch.Generator(like.device).manual_seed((block.seed + start) % 2**63)
    mask = torch.rand(like.shape, generator=generator, device=like.device) >= block.dropout
    return mask.to(like.dtype).div_(1.0 - block.dropout)


def _finite(lse: Tensor) -> Tensor:
    """Replace -inf by 0: exp(-inf - 0) is 0, as intended, while exp(-inf + inf) is NaN."""
    return lse.masked_fill(lse == -math.inf, 0.0)
