"""Causal attention whose result for a query does not depend on other queries, nor on how many keys were padded.

Order of sums: scores are sums over a head's features; the softmax adds exponentials by vectors of keys, counted from
the first token of the sequence; values are added by tiles of 64 keys, one product for each, in their order.  Keys
that a query does not see have the weight zero, which changes no sum.  So a query alone over a cache gives the bits
that it gives in a whole sequence.

Queries are taken by tiles of 64 positions.  Backward computes the weights anew, tile by tile: memory grows with the
length and not with its square.

Rejected: scaled_dot_product_attention, whose blocks depend on the numbers of queries and keys; an online softmax,
which rescales its sums for each tile and costs more passes (Milakov and Gimelshein 2018).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import attrs
import torch
from torch import Tensor

from zengine import _compat
from zengine.inference.attend import causal_mask
from zengine.inference.exact.products import TILE, Products, widened

__all__ = ["KEY_TILE", "AttentionRule", "attend_sequences", "attend_slots", "padded_length"]

KEY_TILE = 64  # keys of one product with values
_QUERY_TILE = 64  # positions


def padded_length(length: int) -> int:
    """Return how many keys are read for `length` of them."""
    return -(-length // KEY_TILE) * KEY_TILE


@final
@attrs.frozen(kw_only=True)
class AttentionRule:
    """Numbers of an attention (structure.Attention)."""

    scale: float
    softcap: float
    window: int

    def weights(self, products: Products, query: Tensor, key: Tensor, hidden: Tensor, first: int = 0) -> Tensor:
        """Return (n, rows, keys) softmax weights of the keys for each query.

        query: (n, rows, size), times the scale; key: (n, keys, size); hidden: (..., keys - first) bool, of keys
        `first` and later, that broadcasts over (n, rows / positions, positions, keys - first).
        """
        scores = products.of_batches(query, key.transpose(1, 2))
        if self.softcap:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        positions = hidden.shape[-2]
        by_position = scores.view(scores.shape[0], -1, positions, scores.shape[-1])
        by_position[..., first:].masked_fill_(hidden, -torch.inf)
        return torch.softmax(scores, -1)


def _mix(products: Products, weights: Tensor, value: Tensor) -> Tensor:
    """Return (n, rows, size): sums of values, (n, keys, size), tile by tile."""
    mixed = products.of_batches(weights[..., :KEY_TILE], value[:, :KEY_TILE])
    for start in range(KEY_TILE, value.shape[1], KEY_TILE):
        tile = slice(start, start + KEY_TILE)
        products.of_batches(weights[..., tile], value[:, tile], added_to=mixed)
    return mixed


@final
@attrs.frozen(kw_only=True)
class _Tile:
    """Queries of one tile of positions, and the keys that one of them may see."""

    rows: slice  # of the queries
    keys: int  # from the first; a multiple of the key tile
    first: int  # the first key that not all these queries see: the mask begins here
    hidden: Tensor  # (positions, keys - first) bool


def _tiles(num_queries: int, start: int, window: int, device: torch.device) -> Iterator[_Tile]:
    """Yield the tiles of queries at positions start, start + 1, ...; their number is a multiple of 16."""
    for at in range(0, num_queries, _QUERY_TILE):
        end = min(at + _QUERY_TILE, num_queries)
        keys, first = padded_length(start + end), 0 if window else start + at
        queries = torch.arange(start + at, start + end, device=device)
        hidden = ~causal_mask(queries, torch.arange(first, keys, device=device), window)
        yield _Tile(rows=slice(at, end), keys=keys, first=first, hidden=hidden)


def _grouped(x: Tensor, groups: int, length: int) -> Tensor:
    """Return (batch * groups, heads / groups, length, size) of (batch, time, heads, size), padded with zeros."""
    batch, time, heads, size = x.shape
    width = max(size, TILE)
    is_padded = time < length or size < width
    made = (x.new_zeros if is_padded else x.new_empty)(batch, heads, length, width)
    made[:, :, :time, :size] = x.transpose(1, 2)
    return made.view(batch * groups, heads // groups, length, width)


def _ungrouped(x: Tensor, like: Tensor) -> Tensor:
    """Undo `_grouped`: (batch, time, heads, size) as `like`, in its dtype."""
    batch, time, heads, size = like.shape
    return x.reshape(batch, heads, *x.shape[2:])[:, :, :time, :size].transpose(1, 2).to(like.dtype)


def _queries(grouped: Tensor, tile: _Tile) -> Tensor:
    """Return the rows of a tile, (n, rows, size): heads of a group after each other."""
    return grouped[:, :, tile.rows].reshape(grouped.shape[0], -1, grouped.shape[-1])


@final
@attrs.frozen(eq=False)
class _Call:
    rule: AttentionRule
    start: int  # position of the first query
    products: Products


def _summed(total: Tensor | None, weights: Tensor, rows: Tensor) -> Tensor:
    """Add what the queries of a tile give to its keys, (n, keys, size), to the first keys of `total`."""
    found = torch.bmm(weights.transpose(1, 2), rows)
    if total is None:
        return found
    total[:, : found.shape[1]] += found
    return total


class _Sequences(torch.autograd.Function):
    """Attention of whole sequences; queries begin at position `start` of the keys."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: _Call) -> Tensor:
        rule, start, products = call.rule, call.start, call.products
        (batch, time, heads, size), groups = query.shape, key.shape[2]
        wide = torch.promote_types(query.dtype, torch.float32)
        num_queries = -(-time // TILE) * TILE
        queries = _grouped(query.to(wide), groups, num_queries).mul_(rule.scale)
        num_keys = padded_length(start + num_queries)
        keys, values = (_grouped(x.to(wide), groups, num_keys).squeeze(1) for x in (key, value))
        mixed = torch.empty_like(queries)
        for tile in _tiles(num_queries, start, rule.window, query.device):
            rows = _queries(queries, tile)
            weights = rule.weights(products, rows, keys[:, : tile.keys], tile.hidden, tile.first)
            mixed[:, :, tile.rows] = _mix(products, weights, values[:, : tile.keys]).view_as(mixed[:, :, tile.rows])
        ctx.save_for_backward(query, key, value)
        ctx.call = call
        return _ungrouped(mixed, query).reshape(batch, time, heads * size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        call: _Call = ctx.call
        rule, start, products = call.rule, call.start, call.products
        time, groups = query.shape[1], key.shape[2]
        wide = torch.promote_types(query.dtype, torch.float32)
        num_queries = -(-time // TILE) * TILE
        queries, grads = (_grouped(x.to(wide), groups, num_queries) for x in (query, grad.view_as(query)))
        queries.mul_(rule.scale)
        num_keys = padded_length(start + num_queries)
        keys, values = (_grouped(x.to(wide), groups, num_keys).squeeze(1) for x in (key, value))
        of_query, of_key, of_value = torch.empty_like(queries), None, None
        for tile in reversed(list(_tiles(num_queries, start, rule.window, query.device))):  # the last sees all keys
            rows, above, seen = _queries(queries, tile), _queries(grads, tile), slice(0, tile.keys)
            weights = rule.weights(products, rows, keys[:, seen], tile.hidden, tile.first)
            of_value = _summed(of_value, weights, above)
            of_weights = products.of_batches(above, values[:, seen].transpose(1, 2))
            of_scores = _compat.softmax_backward(of_weights, weights)
            if rule.softcap:
                capped = products.of_batches(rows, keys[:, seen].transpose(1, 2)).div_(rule.softcap)
                of_scores.mul_(1 - capped.tanh_().square_())
            of_key = _summed(of_key, of_scores, rows)
            of_query[:, :, tile.rows] = products.of_batches(of_scores, keys[:, seen]).view_as(
                of_query[:, :, tile.rows]
            )
        of_query.mul_(rule.scale)
        assert of_key is not None
        assert of_value is not None
        found = (
            _ungrouped(x, like)
            for x, like in ((of_query, query), (of_key.unsqueeze(1), key), (of_value.unsqueeze(1), value))
        )
        return (*found, None)


def attend_sequences(
    products: Products, rule: AttentionRule, query: Tensor, key: Tensor, value: Tensor, start: int = 0
) -> Tensor:
    """Return (batch, queries, heads * size).

    query: (batch, queries, heads, size), at positions start, start + 1, ...; key, value: (batch, keys, kv heads,
    size) of positions 0, 1, ....
    """
    return _Sequences.apply(query, key, value, _Call(rule, start, products))  # type: ignore[no-any-return,no-untyped-call]


def attend_slots(
    products: Products, rule: AttentionRule, query: Tensor, cached: tuple[Tensor, Tensor], lengths: Tensor
) -> Tensor:
    """Return (n, heads * size) of one query of each of n sequences, after its keys.

    query: (n, heads, size); cached: keys and values, (n, kv heads, padded keys, size); lengths: (n,) keys of each.
    """
    num, groups, padded, size = cached[0].shape
    wide = torch.promote_types(query.dtype, torch.float32)
    heads = query.shape[1] // groups
    rows = query.new_zeros(num * groups, -(-heads // TILE) * TILE, max(size, TILE), dtype=wide)
    rows[:, :heads, :size] = query.reshape(num * groups, heads, size)
    rows.mul_(rule.scale)
    hidden = ~causal_mask(lengths[:, None] - 1, torch.arange(padded, device=query.device)[None], rule.window)
    hidden = hidden.repeat_interleave(groups, 0).unsqueeze(1)  # (n * groups, 1, 1, keys)
    key, value = (widened(x.to(wide).flatten(0, 1)) for x in cached)
    mixed = _mix(products, rule.weights(products, rows, key, hidden), value)
    return mixed[:, :heads, :size].reshape(num, groups * heads * size).to(query.dtype)
