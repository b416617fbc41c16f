"""`deepspeed.runtime.rollout`: rollouts of a hybrid engine, and losses of distillation over them."""

from __future__ import annotations

from zengine.deepspeed.runtime.rollout.opsd import JSDLossOutput, ResponseTokenBatch, generalized_jsd_loss
from zengine.rollout.engines import HybridEngineRollout, RolloutEngine, build_rollout
from zengine.rollout.values import RolloutBatch, RolloutConfig, RolloutRequest, SamplingConfig

__all__ = [
    "HybridEngineRollout",
    "JSDLossOutput",
    "ResponseTokenBatch",
    "RolloutBatch",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutRequest",
    "SamplingConfig",
    "build_rollout",
    "generalized_jsd_loss",
]
