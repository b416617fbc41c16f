"""Rollouts: generation with the weights that are being trained.

    engine, *_ = zengine.initialize(model=model, config={..., "hybrid_engine": {"enabled": True}})
    rollout = engine.rollout(prompts, n=8, sampling=SamplingConfig(max_new_tokens=64))
    rewards = [reward(sample.tokens) for sample in rollout.samples]
    batch = rollout.batch(pad_token=0)             # prompt, answer, mask, log-probabilities

Modules, low first: values (what is asked for and returned, by DeepSpeed's names), samples (results), seeds, weights
(the trainer's weights, opened for generation), compare (generation against the trainer), rollouts (the object of an
engine), engines (DeepSpeed's interface over it).
"""

from typing import TYPE_CHECKING

from zengine.imports import homes_below, lazy_attributes

if TYPE_CHECKING:
    from zengine.rollout.engines import HybridEngineRollout, RolloutEngine, build_rollout
    from zengine.rollout.samples import Rollout, RolloutSample, RolloutStats
    from zengine.rollout.values import RolloutBatch, RolloutConfig, RolloutRequest, SamplingConfig

__all__ = [
    "HybridEngineRollout",
    "Rollout",
    "RolloutBatch",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutRequest",
    "RolloutSample",
    "RolloutStats",
    "SamplingConfig",
    "build_rollout",
]

_HOME_OF = homes_below(
    __name__,
    {
        "engines": "HybridEngineRollout RolloutEngine build_rollout",
        "samples": "Rollout RolloutSample RolloutStats",
        "values": "RolloutBatch RolloutConfig RolloutRequest SamplingConfig",
    },
)  # imported on first use

__getattr__, __dir__ = lazy_attributes(__name__, _HOME_OF, with_submodules=True)
