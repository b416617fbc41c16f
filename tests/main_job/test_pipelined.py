"""The model in stages is the model."""

from __future__ import annotations

import pytest
import torch

from train.model import GPT, Shape
from train.pipelined import in_stages, next_byte_loss, pair_of
from train.recipe import RecipeError
from zcomm.testing import run_ranks
from zpartition.pipeline import PipelineModule, PipelineRunner

SMALL = Shape(depth=3, width=32, heads=2, context=16)


def some_windows(count: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (count, SMALL.context + 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def test_one_stage_is_the_model_itself():
    model = GPT(SMALL)
    assert in_stages(model, {}) is model
    with pytest.raises(RecipeError, match="--pipeline 2 does not go with --sequence"):
        in_stages(model, {"pipeline": {"stages": 2}, "sequence_parallel_size": 2})


def staged() -> tuple[list[str], float, float]:
    model = GPT(SMALL, seed=1)
    parts = some_windows(8).split((3, 3, 2))
    losses = [next_byte_loss(model.logits(read), guessed) for read, guessed in map(pair_of, parts)]
    expected = float(sum(losses)) / 3
    stages = in_stages(model, {"pipeline": {"stages": 2}})
    assert isinstance(stages, PipelineModule)
    loss = PipelineRunner.over(stages).train_batch(map(pair_of, parts), 3)
    return [name for name, _ in stages.named_parameters()], float(loss), expected


def test_stages_hold_its_weights_under_its_names_and_find_its_loss():
    (first, loss, expected), (second, other, _) = run_ranks(staged, 2)
    names = {name for name, _ in GPT(SMALL).named_parameters()}
    assert set(first) | set(second) == names
    assert not set(first) & set(second)
    assert loss == other
    assert abs(loss - expected) < 1e-6
