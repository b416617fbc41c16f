"""`deepspeed.runtime.rollout.base`."""

from __future__ import annotations

from zengine.rollout.engines import RolloutEngine
from zengine.rollout.values import RolloutBatch, RolloutConfig, RolloutRequest, SamplingConfig

__all__ = ["RolloutBatch", "RolloutConfig", "RolloutEngine", "RolloutRequest", "SamplingConfig"]
