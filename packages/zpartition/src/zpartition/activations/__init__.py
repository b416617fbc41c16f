"""Activation checkpointing: a block keeps only its inputs, and recomputes the rest in backward.

torch.utils.checkpoint does the recomputation.  This package adds where the inputs are saved (a part on each tensor
rank, on the host, in one preallocated buffer), and the state of several random number streams:

    mp_group = ModelParallelGroup.of(tensor_group)
    checkpoint = Checkpointing(saved_inputs=SavedInputs(mp_group, store=HostStore()))
    x = checkpoint(block, x)
"""

from __future__ import annotations

from zpartition._renamed import renamed
from zpartition.activations.checkpointing import NO_STREAMS, CheckpointedBlocks, Checkpointing, Streams, Variant
from zpartition.activations.saved_inputs import UNPARTITIONED, SavedInputs, saved_numel
from zpartition.activations.stores import ArenaStore, DeviceStore, HostStore, Store
from zpartition.activations.streams import MODEL_PARALLEL, RandomStreams

__all__ = [
    "MODEL_PARALLEL",
    "NO_STREAMS",
    "UNPARTITIONED",
    "ArenaStore",
    "CheckpointedBlocks",
    "Checkpointing",
    "DeviceStore",
    "HostStore",
    "RandomStreams",
    "SavedInputs",
    "Store",
    "Streams",
    "Variant",
    "saved_numel",
]

RENAMED = {
    "Arena": "ArenaStore",
    "AsTheyAre": "DeviceStore",
    "Blocks": "CheckpointedBlocks",
    "Keeping": "SavedInputs",
    "OnHost": "HostStore",
    "WHOLE": "UNPARTITIONED",
    "kept_numel": "saved_numel",
}
__getattr__ = renamed(__name__, RENAMED)
