"""What lives where: ZeRO partitioning of any PyTorch model.

Three nouns: a `Layout` (pure value: where each parameter lives in flat space and who owns which span), a
`Shard` (a tensor with its global address) and a `Partition` (the module's memory, gradients and rebound optimizer
under one `ZeroPolicy`).  Everything above (engines, checkpoints) talks in these.
"""

from __future__ import annotations

from zpartition.access import (
    local_weight,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from zpartition.addressing import StagedState, make_state, state_shards
from zpartition.cells import Cell, cell_of, deals_of, replicas_of, stages_of
from zpartition.deferred import Init, is_deferred, recording
from zpartition.gathered import gathered, is_gathered
from zpartition.layout import Bucket, Layout, ParamSpec, Piece, Slot, plan_layout
from zpartition.loading import load_own_slices, load_slices, refuse_unfit_slices
from zpartition.memory_plan import MemoryPlan, plan
from zpartition.offload import Offload, Speculation, Tier
from zpartition.parking import Holding
from zpartition.partition import Partition
from zpartition.policy import Averaging, ReduceAt, SparseGradients, ZeroPolicy
from zpartition.shard import LazyShard, Shard
from zpartition.sharding import shard
from zpartition.state import Holder
from zpartition.traffic_plan import Flow, TrafficPlan, plan_traffic
from zpartition.whole import Joining, own_parts, whole_state_dict

__version__ = "0.2.0"

__all__ = [
    "Averaging",
    "Bucket",
    "Cell",
    "Flow",
    "Holder",
    "Holding",
    "Init",
    "Joining",
    "Layout",
    "LazyShard",
    "MemoryPlan",
    "Offload",
    "ParamSpec",
    "Partition",
    "Piece",
    "ReduceAt",
    "Shard",
    "Slot",
    "SparseGradients",
    "Speculation",
    "StagedState",
    "Tier",
    "TrafficPlan",
    "ZeroPolicy",
    "cell_of",
    "deals_of",
    "gathered",
    "is_deferred",
    "is_gathered",
    "load_own_slices",
    "load_slices",
    "local_weight",
    "make_state",
    "own_parts",
    "plan",
    "plan_layout",
    "plan_traffic",
    "recording",
    "refuse_unfit_slices",
    "replicas_of",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "shard",
    "stages_of",
    "state_shards",
    "whole_state_dict",
]
