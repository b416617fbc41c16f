"""Generation with the operators of training: a pass over a static cache whose logits are the trainer's, bit for bit.

It has the protocol of decoder.DecoderPass.  A prompt is one sequence of the trainer's attention; a step takes one
token of each of several slots, whose rows go through every operator together, and through an attention whose result
does not depend on the others (attention.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from zengine.inference.cache import KVCache
from zengine.inference.exact.attention import attend_sequences, attend_slots, padded_length
from zengine.inference.exact.blocks import BlockParts, HeadRule, PositionTables, embed, logits_of, rule_of, run_block
from zengine.inference.exact.products import TILE, Products
from zengine.inference.structure import Block, Decoder

__all__ = ["ExactPass"]


@final
class ExactPass:
    """A decoder with its cache, computed by exact operators."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        parts: BlockParts,
        *,
        products: Products,
        tables: PositionTables,
        head_rule: HeadRule = HeadRule(),  # noqa: B008
    ) -> None:
        """Use a cache in the dtype of the weights.  Raises ValueError for one of codes."""
        dtype = decoder.embedding.tokens.dtype
        if cache.key_scales or cache.keys[0].dtype != dtype:
            raise ValueError(
                f"rollout.exact got a cache of {cache.keys[0].dtype} for weights of {dtype}; "
                "training has keys and values in the dtype of the weights, so leave the cache's dtype out"
            )
        self.decoder, self.cache, self.parts, self.head_rule = decoder, cache, parts, head_rule
        self.products, self._tables = products, tables

    @torch.no_grad()
    def forward(self, ids: Tensor, slot: int) -> Tensor:
        """Append (time,) int64 tokens to a slot; return the logits after the last, (vocabulary,) float32.

        Raises ValueError if the slot has no room for them or does not exist; nothing is written then.
        """
        return self._logits(self._hidden(ids, slot)[:, -1:])[0, 0]

    @torch.no_grad()
    def forward_all(self, ids: Tensor, slot: int) -> Tensor:
        """Append (time,) tokens to a slot; return the logits after each of them, (time, vocabulary) float32."""
        return self._logits(self._hidden(ids, slot))[0]

    @torch.no_grad()
    def forward_each(self, ids: Tensor, slots: Sequence[int]) -> Tensor:
        """Append one token to each of several slots; return the logits after it, (n, vocabulary) float32.

        ids: (n,) int64.  slots: n different ones.  A row depends on the tokens of its slot only.

        Raises ValueError if slots are equal, or one is full or does not exist; nothing is written then.
        """
        self.cache.check_each(len(ids), slots)
        num, missing = len(slots), -len(slots) % TILE
        lengths = [self.cache.lengths[slot] for slot in slots]
        positions = torch.tensor(lengths, device=ids.device)
        rows, places = F.pad(ids, (0, missing))[None], F.pad(positions, (0, missing))[None]
        at = _Places(
            slots=torch.tensor(slots, device=ids.device),
            is_all=list(slots) == list(range(self.cache.num_slots)),
            positions=positions,
            padded=places[0],
            most=padded_length(max(lengths) + 1),
        )
        x = embed(self.parts, self.decoder.embedding, rows, places)
        for index, block in enumerate(self.decoder.blocks):
            x = run_block(self.parts, block, x, _Step(self, index, block, at))
        for slot in slots:
            self.cache.lengths[slot] += 1
        return self._logits(x)[0, :num]

    def _hidden(self, ids: Tensor, slot: int) -> Tensor:
        self.cache.check_room(slot, len(ids))
        start = self.cache.lengths[slot]
        positions = torch.arange(start, start + len(ids), device=ids.device)
        x = embed(self.parts, self.decoder.embedding, ids[None], positions[None])
        for index, block in enumerate(self.decoder.blocks):
            x = run_block(self.parts, block, x, _Prompt(self, index, block, slot, positions))
        self.cache.lengths[slot] += len(ids)
        return x

    def _logits(self, x: Tensor) -> Tensor:
        return logits_of(self.parts, self.decoder, self.head_rule, x)

    def rotated(self, block: Block, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate (1, time, heads, size) at positions, (time,)."""
        rotary = block.attention.rotary
        if rotary is None:
            return query, key
        tables = self._tables.of(rotary, self.cache.capacity)
        cos, sin = (table[positions][None] for table in tables)
        return rotary.rotate(query, cos, sin), rotary.rotate(key, cos, sin)


@final
@attrs.frozen(eq=False)
class _Prompt:
    """Attention of new tokens of one slot."""

    steps: ExactPass
    index: int
    block: Block
    slot: int
    positions: Tensor  # (time,) int64

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        steps, slot = self.steps, self.slot
        query, key = steps.rotated(self.block, query, key, self.positions)
        start = steps.cache.lengths[slot]
        steps.cache.write(self.index, slot, start, key, value)
        keys, values = steps.cache.read(self.index, slot, start + query.shape[1])
        return attend_sequences(steps.products, rule_of(self.block.attention), query, keys, values, start)


@final
@attrs.frozen(eq=False, kw_only=True)
class _Places:
    """The tokens of a step."""

    slots: Tensor  # (n,) int64
    is_all: bool  # all slots in their order
    positions: Tensor  # (n,) int64
    padded: Tensor  # (rows,) int64: positions, and zeros for rows of padding
    most: int  # keys that are read of each slot


@final
@attrs.frozen(eq=False)
class _Step:
    """Attention of one token of each of several slots; rows behind them are padding."""

    steps: ExactPass
    index: int
    block: Block
    at: _Places

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        at, rule = self.at, rule_of(self.block.attention)
        query, key = self.steps.rotated(self.block, query, key, at.padded)
        num, rows, cache = len(at.slots), query.shape[1], self.steps.cache
        keys, values = cache.keys[self.index], cache.values[self.index]
        keys[at.slots, :, at.positions] = key[0, :num]
        values[at.slots, :, at.positions] = value[0, :num]
        seen = self._seen(keys), self._seen(values)
        mixed = attend_slots(self.steps.products, rule, query[0, :num], seen, at.positions + 1)
        return F.pad(mixed, (0, 0, 0, rows - num))[None]

    def _seen(self, cached: Tensor) -> Tensor:
        """Return (n, heads, padded keys, size) of the slots."""
        found = cached[:, :, : self.at.most]
        return _padded(found if self.at.is_all else found[self.at.slots], self.at.most)


def _padded(x: Tensor, length: int) -> Tensor:
    """Append zeros to (n, heads, keys, size) up to `length` keys."""
    missing = length - x.shape[2]
    return F.pad(x, (0, 0, 0, missing)) if missing else x
