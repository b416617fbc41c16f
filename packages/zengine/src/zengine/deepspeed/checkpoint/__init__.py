"""`deepspeed.checkpoint`: tools for checkpoints of DeepSpeed."""

from __future__ import annotations

from zengine.deepspeed.checkpoint import utils
from zengine.deepspeed.checkpoint.constants import *  # noqa: F403 - as there
from zengine.deepspeed.checkpoint.deepspeed_checkpoint import DeepSpeedCheckpoint
from zengine.deepspeed.checkpoint.reshape_3d_utils import get_model_3d_descriptor, model_3d_desc
from zengine.deepspeed.checkpoint.reshape_meg_2d import reshape_meg_2d_parallel
from zengine.deepspeed.checkpoint.reshape_utils import merge_state
from zengine.deepspeed.checkpoint.universal_checkpoint import SubparamShape, enable_universal_checkpoint
from zengine.deepspeed.checkpoint.utils import (
    get_layer_ckpt_name_for_rank,
    get_model_ckpt_name_for_rank,
    get_zero_ckpt_name_for_rank,
)
from zengine.deepspeed.checkpoint.zero_checkpoint import ZeROCheckpoint

__all__ = [
    "DeepSpeedCheckpoint",
    "SubparamShape",
    "ZeROCheckpoint",
    "enable_universal_checkpoint",
    "get_layer_ckpt_name_for_rank",
    "get_model_3d_descriptor",
    "get_model_ckpt_name_for_rank",
    "get_zero_ckpt_name_for_rank",
    "merge_state",
    "model_3d_desc",
    "reshape_meg_2d_parallel",
    "utils",
]
