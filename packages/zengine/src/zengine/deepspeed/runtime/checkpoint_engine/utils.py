"""`deepspeed.runtime.checkpoint_engine.utils`."""

from __future__ import annotations

from typing import Any

from zengine.deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

__all__ = ["create_checkpoint_engine"]


def create_checkpoint_engine(
    config_params: Any, groups: Any, zero_stage: int, has_moe_layers: bool, optimize_dp_state: bool
) -> TorchCheckpointEngine:
    """Return a writer of single files; there is one kind, whatever the arguments."""
    return TorchCheckpointEngine(config_params)
