"""Sequence parallelism: a sample's tokens are shared out over ranks that hold the same weights."""

from __future__ import annotations

from zpartition.sequence.batches import SequenceBatches, shift_labels
from zpartition.sequence.chunked import chunked_cross_entropy
from zpartition.sequence.gathering import gather_sequence
from zpartition.sequence.losses import mean_over_sequence, sequence_cross_entropy
from zpartition.sequence.models import ModelAttention
from zpartition.sequence.ring import ring_attention
from zpartition.sequence.shares import HeadShares
from zpartition.sequence.splits import Order, Split
from zpartition.sequence.tiles import tiled, tiled_loss
from zpartition.sequence.traded import TradedBatches
from zpartition.sequence.ulysses import DistributedAttention

__all__ = [
    "DistributedAttention",
    "HeadShares",
    "ModelAttention",
    "Order",
    "SequenceBatches",
    "Split",
    "TradedBatches",
    "chunked_cross_entropy",
    "gather_sequence",
    "mean_over_sequence",
    "ring_attention",
    "sequence_cross_entropy",
    "shift_labels",
    "tiled",
    "tiled_loss",
]
