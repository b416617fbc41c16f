"""Activation checkpointing: a block keeps its inputs alone, and computes the rest again in backward.

torch.utils.checkpoint does the computing again.  What is added here is where the inputs wait (each tensor rank keeps
a part, on the host, in one piece of memory made beforehand), and the random numbers of several streams:

    checkpoint = Checkpointing(keeping=Keeping(cell=Cell.of(tensor_group), store=OnHost()))
    x = checkpoint(block, x)
"""

from __future__ import annotations

from zpartition.activations.blocks import Blocks
from zpartition.activations.checkpointing import Checkpointing, Variant
from zpartition.activations.keeping import WHOLE, Keeping, kept_numel
from zpartition.activations.replay import NO_STREAMS, Streams
from zpartition.activations.stores import Arena, AsTheyAre, OnHost, Store
from zpartition.activations.streams import MODEL_PARALLEL, RandomStreams

__all__ = [
    "MODEL_PARALLEL",
    "NO_STREAMS",
    "WHOLE",
    "Arena",
    "AsTheyAre",
    "Blocks",
    "Checkpointing",
    "Keeping",
    "OnHost",
    "RandomStreams",
    "Store",
    "Streams",
    "Variant",
    "kept_numel",
]
