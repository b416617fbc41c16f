"""Keys and values of the tokens so far, in memory that is allocated once.

A slot holds one sequence.  Keys and values are written in place at their positions; nothing is concatenated, since
that would move the whole history for every token.

Turns of a conversation: what a slot has in memory stays true after its sequence has ended, until another sequence is
written over it.  `KeptSequences` knows the tokens of each slot, so that a prompt that begins with a sequence of an
earlier stream continues it, and only what is new is computed.  `Forgotten` keeps nothing: the default.

An int8 cache has a scale for each token and head: a value differs from what was written by at most 1 / 254 of the
largest magnitude of its head.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import ClassVar, final

import attrs
import torch
from torch import Tensor

from zengine.inference.structure import Decoder

__all__ = ["Forgotten", "KVCache", "KeptSequences", "cache_bytes"]


@final
@attrs.define(eq=False)
class KVCache:
    """Static cache of all blocks.

    Invariant: positions below `lengths[slot]` of a slot are written, in all blocks.
    """

    keys: tuple[Tensor, ...]  # of each block: (slots, kv heads, capacity, head size)
    values: tuple[Tensor, ...]
    lengths: list[int]  # tokens in each slot
    key_scales: tuple[Tensor, ...] = ()  # of each block of an int8 cache: (slots, kv heads, capacity) float32
    value_scales: tuple[Tensor, ...] = ()

    @classmethod
    def create(cls, decoder: Decoder, num_slots: int, capacity: int, dtype: torch.dtype | None = None) -> KVCache:
        """Allocate a cache on the decoder's device.

        capacity: tokens of a slot, prompt and answer.  dtype: that of the weights by default; torch.int8 for codes
            of 8 bits with a scale for each token and head.
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
        if dtype != torch.int8:
            return cls(tuple(made[0]), tuple(made[1]), [0] * num_slots)
        scales = [[torch.zeros(s[:-1], dtype=torch.float32, device=like.device) for s in shapes] for _ in "kv"]
        return cls(tuple(made[0]), tuple(made[1]), [0] * num_slots, tuple(scales[0]), tuple(scales[1]))

    @property
    def capacity(self) -> int:
        """Tokens that a slot can hold."""
        return self.keys[0].shape[2]

    @property
    def num_slots(self) -> int:
        """Sequences that the cache can hold."""
        return self.keys[0].shape[0]

    def check_room(self, slot: int, count: int) -> None:
        """Raise ValueError if a slot does not exist, or has no room for `count` more tokens."""
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot}: the cache has {self.num_slots}, counted from 0")
        start = self.lengths[slot]
        if start + count > self.capacity:
            raise ValueError(
                f"a sequence of {start} tokens and {count} more do not fit into a cache of {self.capacity}: "
                "raise max_out_tokens, or shorten the prompt"
            )

    def write(self, block: int, slot: int, start: int, key: Tensor, value: Tensor) -> None:
        """Write keys and values of new tokens, (1, time, kv heads, size), at positions start, start + 1, ..."""
        rows = slice(start, start + key.shape[1])
        for target, source in ((self.keys[block], key), (self.values[block], value)):
            if not self.key_scales:
                target[slot, :, rows] = source[0].transpose(0, 1)
                continue
            scales = self.key_scales[block] if target is self.keys[block] else self.value_scales[block]
            target[slot, :, rows], scales[slot, :, rows] = _codes(source[0].transpose(0, 1))

    def read(self, block: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first `length` tokens of a slot, (1, length, kv heads, size)."""

        def part(each: tuple[Tensor, ...]) -> Tensor:
            return each[block][slot : slot + 1, :, :length].transpose(1, 2)

        keys, values = part(self.keys), part(self.values)
        if not self.key_scales:
            return keys, values
        return keys * part(self.key_scales).unsqueeze(-1), values * part(self.value_scales).unsqueeze(-1)

    def check_each(self, num_tokens: int, slots: Sequence[int]) -> None:
        """Raise ValueError unless `slots` are as many different ones, each with room for a token."""
        if len(set(slots)) != len(slots) or len(slots) != num_tokens:
            raise ValueError(f"forward_each() got {num_tokens} tokens for the slots {list(slots)}: pass one for each")
        for slot in slots:
            self.check_room(slot, 1)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give `target` the first `length` tokens of `source`: a prompt is computed once for all its samples."""
        if source != target:
            for each in (*self.keys, *self.values, *self.key_scales, *self.value_scales):
                each[target, :, :length] = each[source, :, :length]
        self.lengths[target] = length

    def clear(self, slot: int) -> None:
        """Forget the sequence of a slot; its memory keeps what it holds until it is overwritten."""
        self.lengths[slot] = 0


class Forgotten:
    """What slots have of ended sequences, for the scheduler of a stream: nothing."""

    needs_cache: ClassVar[bool] = False  # the cache stays allocated between streams

    def emptied(self) -> Forgotten:
        """Return the same without sequences: after the weights, or the memory of the cache, have changed."""
        return self

    def begin(self, prompts: Sequence[tuple[int, ...]]) -> Sequence[int]:
        """Return the order in which the prompts of a stream start: those that continue a slot first."""
        return range(len(prompts))

    def source(self, index: int) -> tuple[int, int]:
        """Return a slot that has the beginning of a prompt, and of how many tokens: all but the last at most.

        No slot is -1, with 0 tokens.
        """
        return -1, 0

    def choose(self, free: Sequence[int], preferred: int) -> int:
        """Return the free slot to write a sequence into; `preferred` has its beginning."""
        return free[-1]

    def write(self, slot: int, tokens: tuple[int, ...]) -> None:
        """Record that a slot has the keys and values of these tokens, and no others."""


@final
@attrs.define(eq=False)
class KeptSequences(Forgotten):
    """Tokens whose keys and values slots have, for one cache and one way to compute them.

    A slot that a later prompt of the stream continues is written over last.
    """

    needs_cache = True
    by_slot: dict[int, tuple[int, ...]] = attrs.field(factory=dict)
    prompts: Sequence[tuple[int, ...]] = ()  # of the present stream
    wanted: dict[int, int] = attrs.field(factory=dict)  # prompt that has not begun -> slot that it continues
    claims: collections.Counter[int] = attrs.field(factory=collections.Counter)  # prompts in `wanted`, by slot

    def emptied(self) -> KeptSequences:
        return KeptSequences()

    def begin(self, prompts: Sequence[tuple[int, ...]]) -> Sequence[int]:
        self.prompts, self.wanted = prompts, {}
        for index, prompt in enumerate(prompts):
            length, slot = max(((self._shared(slot, prompt), slot) for slot in self.by_slot), default=(0, 0))
            if length:
                self.wanted[index] = slot
        self.claims = collections.Counter(self.wanted.values())
        return sorted(range(len(prompts)), key=lambda index: index not in self.wanted)

    def source(self, index: int) -> tuple[int, int]:
        slot = self.wanted.pop(index, None)
        if slot is None:
            return -1, 0
        self.claims[slot] -= 1
        return slot, self._shared(slot, self.prompts[index])

    def choose(self, free: Sequence[int], preferred: int) -> int:
        return min(reversed(free), key=lambda slot: (self.claims[slot], slot != preferred, slot in self.by_slot))

    def write(self, slot: int, tokens: tuple[int, ...]) -> None:
        self.by_slot[slot] = tokens

    def _shared(self, slot: int, prompt: tuple[int, ...]) -> int:
        """Return how many tokens a slot's sequence and all but the last of a prompt have in common at the start."""
        kept = self.by_slot.get(slot, ())
        most = min(len(kept), len(prompt) - 1)
        if kept[:most] == prompt[:most]:
            return most
        return next(at for at, (one, other) in enumerate(zip(kept, prompt)) if one != other)


def cache_bytes(decoder: Decoder, num_slots: int, capacity: int, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of a cache: 2 x blocks x kv heads x (head size x itemsize, and 4 for the scales of int8) for
    each token of each slot.
    """
    dtype = dtype or decoder.embedding.tokens.dtype
    attentions = [block.attention for block in decoder.blocks]
    scale_bytes = 4 if dtype == torch.int8 else 0
    per_token = sum(2 * each.num_kv_heads * (each.head_size * dtype.itemsize + scale_bytes) for each in attentions)
    return num_slots * capacity * per_token


def _codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes and float32 scales of (..., size); the scale is NaN if an element is infinite or NaN."""
    x = x.float()
    peak = x.abs().amax(-1)
    is_finite, is_tiny = peak.isfinite(), peak < 2.0**-100
    inverse = torch.where(is_finite & ~is_tiny, torch.full_like(peak, 127.0) / peak, 0.0)
    codes = torch.where(is_finite.unsqueeze(-1), torch.round(x * inverse.unsqueeze(-1)), 0.0).to(torch.int8)
    return codes, torch.where(is_finite, torch.where(is_tiny, 0.0, peak / 127.0), torch.nan)
