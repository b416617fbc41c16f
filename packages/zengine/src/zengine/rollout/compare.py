"""Log-probabilities of the trainer's own forward, and how far a rollout's are from them.

The divergence is estimated by the mean of exp(d) - 1 - d over the tokens of samples of the rollout, with d =
log p(trainer) - log p(rollout): never negative, unbiased, and 0 if they agree (Schulman 2020, "Approximating KL
divergence", k3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import final

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zengine.inference.recognize import run_module
from zengine.rollout.samples import RolloutSample

__all__ = ["Agreement", "agreement", "log_probs_of"]


@final
@attrs.frozen
class Agreement:
    """Distance of two lists of log-probabilities."""

    kl: float = 0.0
    max_delta: float = 0.0


@torch.no_grad()
def log_probs_of(
    module: nn.Module, samples: Sequence[RolloutSample], run: Callable[[nn.Module, Tensor], Tensor] = run_module
) -> list[tuple[float, ...]]:
    """Return the log-probability of each new token of each sample by the module's forward, one sample at a time.

    run: returns the logits, (1, time, vocabulary), of ids, (1, time).

    module: in eval mode.  At stage 3 every rank calls, with equally many samples.
    """
    device = next(module.parameters()).device
    found = []
    for sample in samples:
        ids = torch.tensor([(*sample.prompt, *sample.tokens)], device=device)
        logits = run(module, ids)[0, len(sample.prompt) - 1 : -1]
        rows = F.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
        chosen = torch.tensor(sample.tokens, device=device)
        found.append(tuple(rows.gather(1, chosen[:, None])[:, 0].tolist()))
    return found


def agreement(trainer: Sequence[Sequence[float]], rollout: Sequence[Sequence[float]]) -> Agreement:
    """Return the divergence and the largest difference of log-probabilities, token by token."""
    deltas = [one - other for row, others in zip(trainer, rollout) for one, other in zip(row, others)]
    if not deltas:
        return Agreement()
    kl = sum(math.expm1(delta) - delta for delta in deltas) / len(deltas)
    return Agreement(kl=max(kl, 0.0), max_delta=max(map(abs, deltas)))
