"""`deepspeed.runtime.rollout.hybrid_engine_rollout`."""

from __future__ import annotations

from zengine.rollout.engines import HybridEngineRollout

__all__ = ["HybridEngineRollout"]
