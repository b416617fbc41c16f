"""`deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine`."""

from __future__ import annotations

from zengine.checkpoint.single_files import TorchCheckpointEngine

__all__ = ["TorchCheckpointEngine"]
