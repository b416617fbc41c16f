"""Keys and values of the tokens so far, in memory that is allocated once.

A slot holds one sequence.  Keys and values are written in place at their positions; nothing is concatenated, since
that would move the whole history for every token.
"""

from __future__ import annotations

from typing import final

import attrs
import torch
from torch import Tensor

from zengine.inference.structure import Decoder

__all__ = ["KVCache", "cache_bytes"]


@final
@attrs.define(eq=False)
class KVCache:
    """Static cache of all blocks.

    Invariant: positions below `lengths[slot]` of a slot are written, in all blocks.
    """

    keys: tuple[Tensor, ...]  # of each block: (slots, kv heads, capacity, head size)
    values: tuple[Tensor, ...]
    lengths: list[int]  # tokens in each slot

    @classmethod
    def create(cls, decoder: Decoder, num_slots: int, capacity: int, dtype: torch.dtype | None = None) -> KVCache:
        """Allocate a cache on the decoder's device.

        capacity: tokens of a slot, prompt and answer.  dtype: that of the weights by default.
        Raises ValueError if the model has fewer positions.
        """
        most = decoder.max_positions
        if most is not None and capacity > most:
            raise ValueError(
                f"a cache of {capacity} tokens exceeds the {most} positions that the model has learnt: ask for fewer"
            )
        like = decoder.embedding.tokens
        shapes = [
            (num_slots, block.attention.num_kv_heads, capacity, block.attention.head_size) for block in decoder.blocks
        ]
        made = [[torch.zeros(s, dtype=dtype or like.dtype, device=like.device) for s in shapes] for _ in "kv"]
        return cls(tuple(made[0]), tuple(made[1]), [0] * num_slots)

    @property
    def capacity(self) -> int:
        """Tokens that a slot can hold."""
        return self.keys[0].shape[2]

    @property
    def num_slots(self) -> int:
        """Sequences that the cache can hold."""
        return self.keys[0].shape[0]

    def write(self, block: int, slot: int, start: int, key: Tensor, value: Tensor) -> None:
        """Write keys and values of new tokens, (1, time, kv heads, size), at positions start, start + 1, ..."""
        for target, source in ((self.keys[block], key), (self.values[block], value)):
            target[slot, :, start : start + key.shape[1]] = source[0].transpose(0, 1)

    def read(self, block: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first `length` tokens of a slot, (1, length, kv heads, size)."""
        keys, values = (each[block][slot : slot + 1, :, :length].transpose(1, 2) for each in (self.keys, self.values))
        return keys, values

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give `target` the first `length` tokens of `source`: a prompt is computed once for all its samples."""
        if source != target:
            for each in (*self.keys, *self.values):
                each[target, :, :length] = each[source, :, :length]
        self.lengths[target] = length

    def clear(self, slot: int) -> None:
        """Forget the sequence of a slot; its memory keeps what it holds until it is overwritten."""
        self.lengths[slot] = 0


def cache_bytes(decoder: Decoder, num_slots: int, capacity: int, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of a cache: 2 x blocks x kv heads x head size x itemsize for each token of each slot."""
    itemsize = (dtype or decoder.embedding.tokens.dtype).itemsize
    per_token = sum(2 * block.attention.num_kv_heads * block.attention.head_size for block in decoder.blocks)
    return num_slots * capacity * per_token * itemsize
