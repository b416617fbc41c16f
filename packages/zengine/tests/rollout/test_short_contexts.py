"""Models whose context is shorter than the passes that recognize them, and whose config does not say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_lm import Block, TinyLM, engine_of, train
from torch import Tensor, nn

from zcomm.testing import run_ranks
from zengine.inference.recognize import fitting, recognize
from zengine.inference.verify import verify
from zengine.rollout import RolloutConfig, SamplingConfig


class Short(TinyLM):
    """Learnt positions of a few tokens."""

    def __init__(self, context: int) -> None:
        super().__init__()
        self.places = nn.Embedding(context, self.tokens.embedding_dim)


class Checked(nn.Module):
    """Without positions; a check of the length, as in nanoGPT."""

    def __init__(self, context: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.context, self.tokens = context, nn.Embedding(29, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 29, bias=False)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        assert ids.shape[1] <= self.context, f"a sequence of {ids.shape[1]} tokens, and a context of {self.context}"
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("kind", [Short, Checked])
@pytest.mark.parametrize("context", [6, 12, 17, 23])
def test_a_short_context_is_recognized(kind: Any, context: int) -> None:
    model = kind(context).eval()
    decoder = recognize(model)
    assert decoder.max_positions == (context if kind is Short else None)
    found = verify(decoder, model)
    assert max(found.prompt_error, found.decode_error) < 1e-5


def test_the_first_error_is_raised_if_no_length_fits() -> None:
    def attempt(count: int) -> int:
        raise RuntimeError(f"broken with {count}")

    with pytest.raises(RuntimeError, match="broken with 24"):
        fitting(24, attempt)


def _roll(stage: int, kind: Any, exact: bool) -> list[Any]:
    engine = engine_of(stage, kind(16), hybrid_engine={"enabled": True, "max_out_tokens": 14})
    sampling, config = SamplingConfig(max_new_tokens=10), RolloutConfig(exact=exact, num_slots=2, compare=4)
    made = []
    for steps in (0, 1):
        train(engine, steps)
        rollout = engine.rollout([[1, 2, 3], [4, 5]], n=2, sampling=sampling, seed=steps, config=config)
        assert rollout.stats.max_delta_log_prob <= (0.0 if exact else 1e-5)
        made.append([sample.tokens for sample in rollout.samples])
    engine.close()
    return made


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", [Short, Checked])
def test_rollouts_of_a_short_context(kind: Any, exact: bool) -> None:
    (alone,) = run_ranks(_roll, 1, 0, kind, exact)
    for found in run_ranks(_roll, 2, 3, kind, exact):
        assert found[0] == alone[0]


def test_prompts_beyond_the_positions_are_rejected_by_numbers() -> None:
    engine = engine_of(0, Short(16))
    engine.rollout([[1, 2]], n=1, sampling=SamplingConfig(max_new_tokens=2))
    with pytest.raises(ValueError, match="may have 17 "):
        engine.rollout([list(range(1, 15))], n=1, sampling=SamplingConfig(max_new_tokens=8))
    engine.close()
