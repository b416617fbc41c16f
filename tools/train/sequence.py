"""Sequence parallelism of the main job (--sequence): each rank holds a part of every window.

Attention exchanges heads for positions (Ulysses), or passes keys around a ring if there are fewer heads than ranks.
The loader gives all these ranks the same windows.  Each takes its part of the inputs and of the targets, which are
shifted by one byte before the cut, so every byte is predicted once.
"""

from __future__ import annotations

from torch import Tensor

import zengine
from zpartition.sequence import DistributedAttention, Order, Split, ring_attention, sequence_cross_entropy

from .model import GPT, SequencePart, causal


class RankPart(SequencePart):
    """This rank's part of each window."""

    def __init__(self, engine: zengine.Engine) -> None:
        self._group = engine.seq_parallel_group
        self._attention = DistributedAttention(causal, self._group, scatter_idx=1, gather_idx=2)
        groups = engine.parts.groups
        self._split = Split(engine.sequence_parallel_size, groups.get_sequence_parallel_rank())

    def select(self, tokens: Tensor) -> Tensor:
        return self._split.take(tokens, what="a window")

    def offset(self, time: int) -> int:
        return self._split.rank * time

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.shape[1] < self._split.size:  # heads
            return ring_attention(query, key, value, self._group, is_causal=True, order=Order.CONTIGUOUS)
        attended: Tensor = self._attention(query, key, value)
        return attended

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        return sequence_cross_entropy(scores, targets, self._group)


def split_sequences(model: GPT, engine: zengine.Engine) -> GPT:
    """Let `model` train on this rank's part of each window under sequence parallelism; return `model`."""
    if engine.sequence_parallel_size > 1:
        model.part = RankPart(engine)
    return model
