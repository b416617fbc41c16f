"""The result of a rollout: samples, their log-probabilities, and what it cost."""

from __future__ import annotations

from typing import final

import attrs
import torch

from zengine.rollout.values import RolloutBatch

__all__ = ["Rollout", "RolloutSample", "RolloutStats"]


@final
@attrs.frozen(kw_only=True)
class RolloutSample:
    """One sample of a prompt."""

    prompt_index: int  # among the prompts of the call
    prompt: tuple[int, ...]  # token ids
    tokens: tuple[int, ...]  # new ones, the stop token included
    log_probs: tuple[float, ...]  # of each new token under the weights, before temperature and truncation
    seed: int
    finish: str  # "length" or "token"


@final
@attrs.frozen(kw_only=True)
class RolloutStats:
    """What a rollout was, on this rank."""

    num_tokens: int  # new ones
    num_decode_steps: int  # passes in which all running sequences got a token
    num_prefilled: int  # tokens of prompts that were computed: once for all samples, and what is new in later turns
    duration_s: float
    kl: float  # mean of exp(d) - 1 - d over compared tokens, d = log p(trainer) - log p(rollout); 0 without any
    max_delta_log_prob: float  # largest |d|

    @property
    def tokens_per_second(self) -> float:
        """New tokens of this rank per second."""
        return self.num_tokens / self.duration_s if self.duration_s else 0.0


@final
@attrs.frozen(kw_only=True)
class Rollout:
    """Samples by prompt: the n samples of prompt 0, then those of prompt 1, ..."""

    samples: tuple[RolloutSample, ...]
    weights_version: int  # optimizer steps that the weights had seen
    stats: RolloutStats

    def by_prompt(self) -> list[list[RolloutSample]]:
        """Return the samples of each prompt."""
        found: list[list[RolloutSample]] = []
        for sample in self.samples:
            if sample.prompt_index == len(found):
                found.append([])
            found[-1].append(sample)
        return found

    def batch(self, pad_token: int = 0, device: torch.device | str = "cpu") -> RolloutBatch:
        """Return the samples as tensors in DeepSpeed's layout: padding, prompt, sample, padding.

        Raises ValueError without samples.
        """
        if not self.samples:
            raise ValueError("the rollout has no samples, since this rank gave no prompts: there is no batch of them")
        longest = max(len(sample.prompt) for sample in self.samples)
        width = longest + max(len(sample.tokens) for sample in self.samples)
        shape = (len(self.samples), width)
        ids = torch.full(shape, pad_token, dtype=torch.int64)
        mask, log_probs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        for row, sample in enumerate(self.samples):
            first, end = longest - len(sample.prompt), longest + len(sample.tokens)
            ids[row, first:end] = torch.tensor((*sample.prompt, *sample.tokens))
            mask[row, first:end] = 1
            log_probs[row, longest:end] = torch.tensor(sample.log_probs)
        starts = torch.full((len(self.samples),), longest, dtype=torch.int64)
        return RolloutBatch(ids.to(device), mask.to(device), starts.to(device), log_probs.to(device))
