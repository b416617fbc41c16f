"""The computation of recognised blocks with exact operators: one text for training and for generation.

A caller gives the parts that differ: how a projection or a norm is reached (through the user's modules, so that hooks
and adapters run, or from the decoder's tensors), and the attention (over whole sequences, or over a cache).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol, final

import attrs
import torch
from torch import Tensor

from zengine.inference.exact.attention import AttentionRule
from zengine.inference.exact.operators import activate, linear, normalize
from zengine.inference.exact.products import Products, pad_rows
from zengine.inference.structure import (
    MLP,
    Attention,
    Block,
    Decoder,
    Embedding,
    Head,
    Mixture,
    MLPInput,
    Norm,
    Projection,
    Rotary,
)

__all__ = [
    *("HeadRule", "BlockParts", "PositionTables", "WeightParts"),
    *("embed", "finished", "logits_of", "rule_of", "run_block", "run_mixture"),
]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries, keys, values -> (batch, time, heads * size)

_ROWS = 2048  # tables are made for a multiple of so many positions


class BlockParts(Protocol):
    """Projections and norms of a decoder, by exact operators."""

    def project(self, projection: Projection, x: Tensor) -> Tensor:
        """x: (..., in).  Returns (..., out)."""
        ...

    def normalize(self, norm: Norm, x: Tensor) -> Tensor:
        """Return the shape and dtype of x."""
        ...

    def mix(self, mixture: Mixture, x: Tensor) -> Tensor:
        """Return the shape and dtype of x: what `run_mixture` computes."""
        ...


@final
@attrs.frozen(eq=False)
class WeightParts:
    """BlockParts from the tensors of the decoder itself."""

    products: Products

    def project(self, projection: Projection, x: Tensor) -> Tensor:
        """Apply (out, in) weights.  Raises TypeError for quantized ones."""
        if not isinstance(projection.weight, Tensor):
            raise TypeError(
                f"{projection.name} is quantized; exact operators need float32, bfloat16 or float16 weights"
            )
        return linear(self.products, x, projection.weight, projection.bias)

    def normalize(self, norm: Norm, x: Tensor) -> Tensor:
        """Apply a norm."""
        return normalize(norm, x)

    def mix(self, mixture: Mixture, x: Tensor) -> Tensor:
        """Apply a mixture of experts."""
        return run_mixture(self, mixture, x)


@final
@attrs.frozen(eq=False)
class PositionTables:
    """Cosines and sines of positions, made once for training and generation.

    Tables grow by whole multiples of 2048 positions, and rows that were made stay: a row does not depend on how many
    positions were asked for.
    """

    made: dict[int, tuple[Tensor, Tensor]] = attrs.field(factory=dict)  # by id of the maker

    def of(self, rotary: Rotary, count: int) -> tuple[Tensor, Tensor]:
        """Return (rows, size / 2) each, of at least `count` positions.

        Raises ValueError if the rows of a longer table differ: positions that change with the length of a sequence.
        """
        key = id(rotary.make_tables)
        held = self.made.get(key)
        if held is not None and held[0].shape[0] >= count:
            return held
        with torch.no_grad():
            found = rotary.make_tables(-(-count // _ROWS) * _ROWS)
            before = held or rotary.make_tables(16)
        rows = before[0].shape[0]
        if not all(torch.allclose(new[:rows], old, atol=1e-5) for new, old in zip(found, before)):
            raise ValueError(
                "the rotary positions of this model change with the length of a sequence, so keys cannot be cached"
            )
        cos, sin = found
        if held is not None:
            cos, sin = (torch.cat((old, new[rows:])) for old, new in zip(held, found))
        self.made[key] = cos.clone(), sin.clone()
        return self.made[key]


def rule_of(attention: Attention) -> AttentionRule:
    """Return the numbers of an attention."""
    return AttentionRule(scale=attention.scale, softcap=attention.softcap, window=attention.window)


def embed(parts: BlockParts, embedding: Embedding, ids: Tensor, positions: Tensor) -> Tensor:
    """Return (batch, time, width); ids, positions: (batch, time) int64."""
    x = embedding.summed(ids, positions)
    return x if embedding.norm is None else parts.normalize(embedding.norm, x)


def run_block(parts: BlockParts, block: Block, x: Tensor, attend: Attend) -> Tensor:
    """Return the block's output; x: (batch, time, width)."""
    source = x if block.attention_norm is None else parts.normalize(block.attention_norm, x)
    attention = block.attention
    projected = [parts.project(each, source) for each in attention.projections]
    query, key, value = attention.split(projected)
    mixed = attend(
        _by_head(parts, query, attention.query_norm, attention.head_size),
        _by_head(parts, key, attention.key_norm, attention.head_size),
        _by_head(parts, value, None, attention.head_size),
    )
    written = parts.project(attention.out, mixed)
    if block.attention_out_norm is not None:
        written = parts.normalize(block.attention_out_norm, written)
    residual = _add(x, written, block.attention_factor)
    given = {MLPInput.RESIDUAL: residual, MLPInput.BLOCK: x, MLPInput.ATTENTION: source}[block.mlp_input]
    if block.mlp_norm is not None:
        given = parts.normalize(block.mlp_norm, given)
    assert isinstance(block.mlp, (MLP, Mixture))
    added = parts.mix(block.mlp, given) if isinstance(block.mlp, Mixture) else _mlp(parts, block.mlp, given)
    if block.mlp_out_norm is not None:
        added = parts.normalize(block.mlp_out_norm, added)
    return _add(residual, added, block.mlp_factor)


def _by_head(parts: BlockParts, x: Tensor, norm: Norm | None, size: int) -> Tensor:
    """Return (..., heads, size) of (..., heads * size), normalized over a head or over all heads."""
    by_head = (*x.shape[:-1], x.shape[-1] // size, size)
    if norm is None:
        return x.reshape(by_head)
    is_whole = norm.weight is not None and norm.weight.numel() != size
    return parts.normalize(norm, x).view(by_head) if is_whole else parts.normalize(norm, x.reshape(by_head))


def _mlp(parts: BlockParts, mlp: MLP, x: Tensor) -> Tensor:
    if mlp.is_fused:
        gate, up = parts.project(mlp.up, x).chunk(2, dim=-1)
        return parts.project(mlp.down, activate(mlp.act, gate) * up)
    up = parts.project(mlp.up, x)
    if mlp.gate is None:
        return parts.project(mlp.down, activate(mlp.act, up))
    return parts.project(mlp.down, activate(mlp.act, parts.project(mlp.gate, x)) * up)


def run_mixture(parts: BlockParts, mixture: Mixture, x: Tensor) -> Tensor:
    """Return the output of a mixture of experts; x: (..., width).

    A position's experts are added in the order of their numbers, so its sum does not depend on other positions.
    """
    flat = x.reshape(-1, x.shape[-1])
    weights, chosen = _route(parts, mixture, flat)
    out = torch.zeros_like(flat)
    for expert in sorted(set(chosen.flatten().tolist())):
        row, column = (chosen == expert).nonzero(as_tuple=True)
        y = _mlp(parts, mixture.experts[expert], flat[row]) * weights[row, column, None]
        out = out.index_add(0, row, y.to(out.dtype))
    if mixture.shared is not None:
        common = _mlp(parts, mixture.shared, flat)
        if mixture.shared_gate is not None:
            common = activate(torch.sigmoid, parts.project(mixture.shared_gate, flat)) * common
        out = out + common
    return out.view(x.shape)


def _route(parts: BlockParts, mixture: Mixture, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights and numbers of the chosen experts, (n, top_k) each, of x, (n, width)."""
    outputs = pad_rows(parts.project(mixture.router, x))
    probabilities = torch.softmax(outputs.to(torch.promote_types(outputs.dtype, torch.float32)), dim=-1)
    weights, chosen = probabilities[: x.shape[0]].topk(mixture.top_k, dim=-1)
    if mixture.is_renormalized:
        weights = weights / functools.reduce(torch.add, weights.unbind(-1)).unsqueeze(-1)  # in one order
    return (weights * mixture.factor).to(x.dtype), chosen


def _add(x: Tensor, written: Tensor, factor: float) -> Tensor:
    return x + written if factor == 1.0 else x + written * factor


@final
@attrs.frozen
class HeadRule:
    """Rounding of what follows the last projection: that of the module's own code."""

    is_narrow: bool = False  # factor and soft cap in the dtype of the weights, and not in float32
    divisor: float = 0.0  # instead of the factor; 0: none


def finished(head: Head, rule: HeadRule, y: Tensor) -> Tensor:
    """Return the logits, float32, of the projection's output."""
    if not rule.is_narrow:
        y = y.to(torch.promote_types(y.dtype, torch.float32))
    if head.factor != 1.0:
        y = y / rule.divisor if rule.divisor else y * head.factor
    if head.softcap:
        y = torch.tanh(y / head.softcap) * head.softcap
    return y.to(torch.promote_types(y.dtype, torch.float32))


def logits_of(parts: BlockParts, decoder: Decoder, rule: HeadRule, x: Tensor) -> Tensor:
    """Return (..., vocabulary) float32 logits of the last block's output."""
    normed = x if decoder.norm is None else parts.normalize(decoder.norm, x)
    return finished(decoder.head, rule, parts.project(decoder.head.projection, normed))
