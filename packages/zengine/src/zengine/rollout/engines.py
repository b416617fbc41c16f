"""DeepSpeed's rollout interface over an engine: requests and batches as tensors.

rollout = build_rollout(RolloutConfig(), student_engine=engine, tokenizer=tokenizer)
batch = rollout.generate(RolloutRequest(ids, mask), SamplingConfig(max_new_tokens=64, n_samples_per_prompt=8))
"""

from __future__ import annotations

import abc
import copy
from typing import TYPE_CHECKING, Any, final

from zengine.rollout.values import RolloutBatch, RolloutConfig, RolloutRequest, SamplingConfig

if TYPE_CHECKING:
    from zengine.rollout.samples import RolloutStats

__all__ = ["HybridEngineRollout", "RolloutEngine", "build_rollout"]


class RolloutEngine(abc.ABC):
    """What generates for a trainer."""

    name: str = "base"

    @abc.abstractmethod
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Return prompts with their samples."""

    @abc.abstractmethod
    def sync_weights(self, step: int) -> None:
        """Give the engine the trainer's present weights."""

    def shutdown(self) -> None:
        """Release what the engine holds."""
        return


@final
class HybridEngineRollout(RolloutEngine):
    """Generates with the weights of a hybrid engine.

    tokenizer: gives the padding token and the token that ends a sample (`pad_token_id`, `eos_token_id`).

    Raises TypeError for an engine whose config does not enable "hybrid_engine".
    """

    name = "hybrid_engine"

    def __init__(self, engine: Any, tokenizer: Any, cfg: RolloutConfig | None = None) -> None:
        if not hasattr(engine, "rollout"):
            raise TypeError(
                f'{type(engine).__name__} makes no rollouts: write "hybrid_engine": {{"enabled": true}} in its config'
            )
        self.engine, self.tokenizer, self.config = engine, tokenizer, cfg or RolloutConfig()
        self.last_stats: RolloutStats | None = None  # of the last `generate`

    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Return the samples, those of one prompt in consecutive rows.

        Raises:
            ValueError: a prompt is too long, or the tokenizer has neither token.
        """
        end, pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        pad = end if pad is None else pad
        if pad is None:
            raise ValueError("the tokenizer has neither pad_token_id nor eos_token_id: set one of them")
        rule = copy.copy(sampling)
        if end is not None and end not in rule.stop_tokens:
            rule.stop_tokens = (*rule.stop_tokens, end)
        rollout = self.engine.rollout(request.prompts(), sampling=rule, config=self.config)
        self.last_stats = rollout.stats
        device = request.prompt_ids.device
        return _with_width(rollout.batch(pad, device), request.prompt_ids.shape[1], pad)

    def sync_weights(self, step: int) -> None:
        """Do nothing: generation reads the trainer's weights."""


def _with_width(batch: RolloutBatch, prompt_width: int, pad: int) -> RolloutBatch:
    """Return the batch with prompts of that many columns, as in the request."""
    from torch.nn import functional as F

    extra = prompt_width - int(batch.response_start_idx[0])
    assert batch.log_probs is not None
    return RolloutBatch(
        F.pad(batch.input_ids, (extra, 0), value=pad),
        F.pad(batch.attention_mask, (extra, 0)),
        batch.response_start_idx + extra,
        F.pad(batch.log_probs, (extra, 0)),
    )


def build_rollout(
    rollout_cfg: RolloutConfig, student_engine: Any = None, tokenizer: Any = None, **kwargs: Any
) -> RolloutEngine:
    """Return the engine that `rollout_cfg.engine` names.  Raises ValueError for another name, or without parts."""
    if rollout_cfg.engine != "hybrid_engine":
        raise ValueError(f"unknown rollout engine {rollout_cfg.engine!r}; choose 'hybrid_engine'")
    if student_engine is None or tokenizer is None:
        raise ValueError("build_rollout() needs student_engine= and tokenizer= for 'hybrid_engine'")
    return HybridEngineRollout(student_engine, tokenizer, rollout_cfg)
