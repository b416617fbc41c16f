"""`deepspeed.utils.groups`: which ranks do what together.

The model is split by ZeRO alone here, so every rank is a data-parallel replica, or those that `mpu` names are.  Sizes
and ranks of the other kinds of group are 1 and 0; asking for such a *group* refuses, because None, which torch takes
for all ranks, would be another answer.
"""

from __future__ import annotations

from typing import Any

from zengine.deepspeed.comm.world import get_rank, get_world_group, get_world_size
from zengine.deepspeed.later import refusing

__all__ = [
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "initialize",
]

mpu: Any = None  # of the last deepspeed.initialize(mpu=...), as DeepSpeed has it here


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Accepted for scripts that announce their groups; refuses an expert-parallel size of more than 1."""
    if ep_size > 1:
        refusing("utils.groups expert groups")
    globals()["mpu"] = mpu


def get_data_parallel_group() -> Any:
    """The ranks that are replicas."""
    return get_world_group() if mpu is None else mpu.get_data_parallel_group()


def get_data_parallel_world_size() -> int:
    """How many they are."""
    return get_world_size() if mpu is None else get_world_size(mpu.get_data_parallel_group())


def get_data_parallel_rank() -> int:
    """Which of them this is."""
    return get_rank() if mpu is None else get_rank(mpu.get_data_parallel_group())


def get_model_parallel_world_size() -> int:
    """1: nothing but ZeRO splits the model."""
    return 1


def get_model_parallel_rank() -> int:
    """0."""
    return 0


def get_sequence_parallel_world_size() -> int:
    """1: sequences are whole."""
    return 1


def get_sequence_parallel_rank() -> int:
    """0."""
    return 0


get_tensor_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank


def _get_model_parallel_group() -> Any:
    refusing("utils.groups model group")


def _get_sequence_parallel_group() -> Any:
    refusing("utils.groups sequence group")


def _get_expert_parallel_group(group_name: str = "") -> Any:
    refusing("utils.groups expert groups")


_get_expert_data_parallel_group = _get_expert_parallel_group

# The underscored spellings are the ones that DeepSpeed's users and Transformers call.
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = get_model_parallel_world_size
_get_model_parallel_rank = get_model_parallel_rank
_get_sequence_parallel_world_size = get_sequence_parallel_world_size
_get_sequence_parallel_rank = get_sequence_parallel_rank
_get_sequence_data_parallel_group = get_data_parallel_group
_get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_sequence_data_parallel_rank = get_data_parallel_rank
