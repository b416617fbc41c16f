"""`deepspeed.runtime.checkpoint_engine`: writers of single files."""

from __future__ import annotations

from zengine.deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
from zengine.deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from zengine.deepspeed.runtime.checkpoint_engine.utils import create_checkpoint_engine

__all__ = ["CheckpointCommitInfo", "TorchCheckpointEngine", "create_checkpoint_engine"]
