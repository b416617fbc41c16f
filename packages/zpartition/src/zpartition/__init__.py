"""ZeRO partitioning of any PyTorch model.

Three nouns: a `Layout` (pure value: the position of each parameter in flat space and the owner of each span), a
`Shard` (a tensor with its global address) and a `Partition` (the module's memory, gradients and rebound optimizer
under one `ZeroPolicy`).  Engines and checkpoints build on these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zpartition._renamed import renamed
from zpartition.bucket_exchange import BucketExchange
from zpartition.core import UnusedParametersError
from zpartition.deferred.init import Init, is_deferred, recording, suspend_init
from zpartition.deferred.on_meta import on_meta
from zpartition.estimate.memory import MemoryPlan, plan
from zpartition.estimate.traffic import Flow, TrafficPlan, plan_traffic
from zpartition.layout.address import Address, LazyShard, Shard
from zpartition.layout.layout import Bucket, Layout, ParamSpec, Piece, Slot, plan_layout
from zpartition.layout.model_parallel import (
    ModelParallelGroup,
    addresses_of,
    expert_ranks_of,
    expert_shards_of,
    model_parallel_group_of,
    pipeline_stages_of,
    replicas_of,
)
from zpartition.layout.policy import (
    Averaging,
    BucketSizing,
    Offload,
    OffloadStateType,
    ReduceAt,
    SparseGradients,
    Speculation,
    Tier,
    ZeroPolicy,
)
from zpartition.layout.selective import ColumnMoments, SelectivePolicy
from zpartition.ownership import reclaim_weights
from zpartition.partition import Partition, check_local_gradients
from zpartition.sharding import shard
from zpartition.state.addressing import StagedState, make_state, number_forms, state_shards
from zpartition.state.optimizer_state import Holder
from zpartition.tensors.access import (
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
from zpartition.tensors.gathered import gathered, is_gathered
from zpartition.tensors.loading import check_slices, load_own_slices, load_slices
from zpartition.tensors.whole import FullTensors, own_parts, whole_state_dict

__version__ = "0.3.0"

__all__ = [
    "Address",
    "Averaging",
    "Bucket",
    "BucketExchange",
    "BucketSizing",
    "ColumnMoments",
    "Flow",
    "FullTensors",
    "Holder",
    "Init",
    "Layout",
    "LazyShard",
    "MemoryPlan",
    "ModelParallelGroup",
    "Offload",
    "OffloadStateType",
    "ParamSpec",
    "Partition",
    "Piece",
    "ReduceAt",
    "SelectivePolicy",
    "Shard",
    "Slot",
    "SparseGradients",
    "Speculation",
    "StagedState",
    "Tier",
    "TrafficPlan",
    "UnusedParametersError",
    "ZeroPolicy",
    "addresses_of",
    "check_local_gradients",
    "check_slices",
    "expert_ranks_of",
    "expert_shards_of",
    "gathered",
    "is_deferred",
    "is_gathered",
    "load_own_slices",
    "load_slices",
    "local_weight",
    "make_state",
    "model_parallel_group_of",
    "number_forms",
    "on_meta",
    "own_parts",
    "pipeline_stages_of",
    "plan",
    "plan_layout",
    "plan_traffic",
    "reclaim_weights",
    "recording",
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
    "state_shards",
    "suspend_init",
    "whole_state_dict",
]

RENAMED = {
    "Cell": "ModelParallelGroup",
    "Holding": "OffloadStateType",
    "Joining": "FullTensors",
    "cell_of": "model_parallel_group_of",
    "deals_of": "expert_shards_of",
    "refuse_unfit_slices": "check_slices",
    "stages_of": "pipeline_stages_of",
}  # public names of 0.2 -> those of 0.3

if not TYPE_CHECKING:  # type checkers report old names as missing
    __getattr__ = renamed(__name__, RENAMED)
