"""--sequence: ranks share the bytes of each window, and exchange heads for bytes around each attention, or send keys
round where there are fewer heads than ranks.

The loader gives all of them the same windows.  Each takes its run of the bytes to read and of those to guess, which
were told apart before, so no byte is guessed by nobody.
"""

from __future__ import annotations

from torch import Tensor

import zengine
from zpartition.sequence import DistributedAttention, Order, Split, ring_attention, sequence_cross_entropy

from .model import GPT, Part, causal


class Share(Part):
    """The run of this rank's bytes, of each window."""

    def __init__(self, engine: zengine.Engine) -> None:
        self._group = engine.seq_parallel_group
        self._attention = DistributedAttention(causal, self._group, scatter_idx=1, gather_idx=2)
        groups = engine.parts.groups
        self._split = Split(engine.sequence_parallel_size, groups.get_sequence_parallel_rank())

    def of(self, tokens: Tensor) -> Tensor:
        return self._split.take(tokens, what="a window")

    def begin(self, time: int) -> int:
        return self._split.rank * time

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.shape[1] < self._split.size:  # heads
            return ring_attention(query, key, value, self._group, is_causal=True, order=Order.CONTIGUOUS)
        attended: Tensor = self._attention(query, key, value)
        return attended

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        return sequence_cross_entropy(scores, targets, self._group)


def share_windows(model: GPT, engine: zengine.Engine) -> GPT:
    """Let `model` train on this rank's share of each window, if the engine shares them out; returns it."""
    if engine.sequence_parallel_size > 1:
        model.part = Share(engine)
    return model
