"""What lives where: ZeRO partitioning of any PyTorch model.

Three nouns: a `Layout` (pure value: where each parameter lives in flat space and who owns which span), a
`Shard` (a tensor with its global address) and a `Partition` (the module's memory, gradients and rebound optimizer
under one `ZeroPolicy`).  Everything above (engines, checkpoints) talks in these.
"""

from __future__ import annotations

from zpartition.addressing import make_state, state_shards
from zpartition.layout import Bucket, Layout, ParamSpec, Piece, Slot, plan_layout
from zpartition.partition import Partition, shard
from zpartition.policy import Averaging, ReduceAt, ZeroPolicy
from zpartition.shard import Shard
from zpartition.state import Holder

__version__ = "0.1.0"

__all__ = [
    "Averaging",
    "Bucket",
    "Holder",
    "Layout",
    "ParamSpec",
    "Partition",
    "Piece",
    "ReduceAt",
    "Shard",
    "Slot",
    "ZeroPolicy",
    "make_state",
    "plan_layout",
    "shard",
    "state_shards",
]
