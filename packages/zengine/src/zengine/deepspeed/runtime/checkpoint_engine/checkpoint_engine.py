"""`deepspeed.runtime.checkpoint_engine.checkpoint_engine`."""

from __future__ import annotations

from zengine.checkpoint.single_files import CheckpointCommitInfo, CheckpointEngine

__all__ = ["CheckpointCommitInfo", "CheckpointEngine"]
