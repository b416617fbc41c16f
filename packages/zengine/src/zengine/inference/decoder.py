"""Forward pass of a recognised decoder over a static cache.

`forward` takes the new tokens of a slot, a prompt or a part of it, writes their keys and values in place, and
computes logits for the last position only.  Sequences are computed one by one: a product or a sum of torch over
several at once may round otherwise for another number of them, and then a sample would depend on its neighbours.

`forward_each` takes one token of each of several slots.  Blocks that fused.py could compile run in C, where each
weight is read once for all sequences and rounding does not depend on their number; the others run as in `forward`.

Phases of a block: norm, projections, rotation, cache write, attention over the slot, output, norm, MLP.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from zengine.inference.attend import attend, causal_mask
from zengine.inference.cache import KVCache
from zengine.inference.fused import Fusion, FusionReport
from zengine.inference.observe import tensors_in
from zengine.inference.structure import Attention, Block, Decoder, MLPInput, Rotary

__all__ = ["DecoderPass"]

_FEW = 16  # positions for which the tables are made twice


@final
class DecoderPass:
    """A decoder with its cache, and the rotary tables of all positions."""

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self.decoder, self.cache = decoder, cache
        # by the identity of their maker: cosines and sines, (capacity, size / 2) each
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}
        for block in decoder.blocks:
            rotary = block.attention.rotary
            if rotary is not None and id(rotary.make_tables) not in self._tables:
                self._tables[id(rotary.make_tables)] = _tables(rotary, cache.capacity)
        self._fusion: Fusion | None = None  # made by the first step that needs it

    @property
    def fused(self) -> FusionReport:
        """Names of the parts that `forward_each` runs in C, and why others do not."""
        return self._current_fusion().report

    def _current_fusion(self) -> Fusion:
        """Return the fused parts; they are made anew if a parameter got other memory."""
        if self._fusion is None or not self._fusion.is_current:
            self._fusion = Fusion.make(self.decoder, self.cache, self._tables)
        return self._fusion

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
        fusion = self._current_fusion()
        if not fusion.report.fused:
            return torch.stack([self.forward(ids[at : at + 1], slot) for at, slot in enumerate(slots)])
        most = fusion.most_sequences
        parts = [self._each(fusion, ids[at : at + most], slots[at : at + most]) for at in range(0, len(slots), most)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _each(self, fusion: Fusion, ids: Tensor, slots: Sequence[int]) -> Tensor:
        """Run fused blocks on all tokens at once, and others on one after the other."""
        lengths = [self.cache.lengths[slot] for slot in slots]
        positions = torch.tensor(lengths, device=ids.device)
        x = self._embedded(ids, positions)
        dtype, wide, logits = x.dtype, x.float().contiguous(), None
        for part in fusion.parts:
            if part.fused is not None:
                logits = fusion.run(wide, slots, lengths, part)
                continue
            for index, (at, slot) in itertools.product(part.blocks, enumerate(slots)):
                row = wide[at].to(dtype).view(1, 1, -1)
                wide[at] = self._block(index, self.decoder.blocks[index], row, slot, positions[at : at + 1])[0, 0]
        if logits is None:
            logits = torch.stack([self._logits(row.to(dtype).view(1, 1, -1))[0, 0] for row in wide])
        for slot in slots:
            self.cache.lengths[slot] += 1
        return logits

    def _embedded(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return (n, width).  A norm is computed row by row: its sums may round otherwise for several rows."""
        embed = self.decoder.embedding
        if embed.norm is None:
            return embed(ids[None], positions[None])[0]
        rows = [embed(ids[None, at : at + 1], positions[None, at : at + 1])[0] for at in range(len(ids))]
        return torch.cat(rows)

    def _hidden(self, ids: Tensor, slot: int) -> Tensor:
        self.cache.check_room(slot, len(ids))
        cache, start = self.cache, self.cache.lengths[slot]
        positions = torch.arange(start, start + len(ids), device=ids.device)
        x = self.decoder.embedding(ids[None], positions[None])
        for index, block in enumerate(self.decoder.blocks):
            x = self._block(index, block, x, slot, positions)
        cache.lengths[slot] += len(ids)
        return x

    def _logits(self, x: Tensor) -> Tensor:
        return self.decoder.head(x if self.decoder.norm is None else self.decoder.norm(x))

    def _block(self, index: int, block: Block, x: Tensor, slot: int, positions: Tensor) -> Tensor:
        source = x if block.attention_norm is None else block.attention_norm(x)
        written = self._attend(index, block.attention, source, slot, positions)
        if block.attention_out_norm is not None:
            written = block.attention_out_norm(written)
        residual = _add(x, written, block.attention_factor)
        given = {MLPInput.RESIDUAL: residual, MLPInput.BLOCK: x, MLPInput.ATTENTION: source}[block.mlp_input]
        if block.mlp_norm is not None:
            given = block.mlp_norm(given)
        mixed = next(tensors_in(block.mlp(given))).view_as(given)
        if block.mlp_out_norm is not None:
            mixed = block.mlp_out_norm(mixed)
        return _add(residual, mixed, block.mlp_factor)

    def _attend(self, index: int, attention: Attention, x: Tensor, slot: int, positions: Tensor) -> Tensor:
        query, key, value = attention.project(x)
        rotary, end = attention.rotary, self.cache.lengths[slot] + len(positions)
        if rotary is not None:
            cos, sin = (table[positions][None] for table in self._tables[id(rotary.make_tables)])
            query, key = rotary.rotate(query, cos, sin), rotary.rotate(key, cos, sin)
        self.cache.write(index, slot, self.cache.lengths[slot], key, value)
        keys, values = self.cache.read(index, slot, end)
        mask = causal_mask(positions, torch.arange(end, device=x.device), attention.window)[None]
        mixed = attend(query, keys, values, mask, scale=attention.scale, softcap=attention.softcap)
        return attention.out(mixed)


def _tables(rotary: Rotary, capacity: int) -> tuple[Tensor, Tensor]:
    """Return the tables of all positions.  Raises ValueError if they depend on how many there are."""
    found = rotary.make_tables(capacity)
    few = rotary.make_tables(min(capacity, _FEW))
    if not all(torch.equal(table[: len(other)], other) for table, other in zip(found, few)):
        raise ValueError(
            f"the rotary positions of this model change with the length of a sequence, so keys cannot be cached for "
            f"{capacity} positions: use the module itself"
        )
    return found


def _add(x: Tensor, written: Tensor, factor: float) -> Tensor:
    return x + written if factor == 1.0 else x + written * factor
