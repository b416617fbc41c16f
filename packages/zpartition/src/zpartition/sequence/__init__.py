"""Sequence parallelism: the tokens of a sample are split over ranks that hold the same weights."""

from __future__ import annotations

from zpartition._renamed import renamed
from zpartition.sequence.batches import ExchangedBatches, SequenceBatches, shift_labels
from zpartition.sequence.chunked import chunked_cross_entropy
from zpartition.sequence.head_all_to_all import Dims, HeadAssignment, to_heads, to_tokens
from zpartition.sequence.losses import gather_sequence, mean_over_sequence, sequence_cross_entropy
from zpartition.sequence.models import ModelAttention
from zpartition.sequence.ring import ring_attention
from zpartition.sequence.splits import Order, Split
from zpartition.sequence.tiles import tiled, tiled_loss
from zpartition.sequence.ulysses import DistributedAttention

__all__ = [
    "Dims",
    "DistributedAttention",
    "ExchangedBatches",
    "HeadAssignment",
    "ModelAttention",
    "Order",
    "SequenceBatches",
    "Split",
    "chunked_cross_entropy",
    "gather_sequence",
    "mean_over_sequence",
    "ring_attention",
    "sequence_cross_entropy",
    "shift_labels",
    "tiled",
    "tiled_loss",
    "to_heads",
    "to_tokens",
]

RENAMED = {
    "HeadShares": "HeadAssignment",
    "TradedBatches": "ExchangedBatches",
}
__getattr__ = renamed(__name__, RENAMED)
