"""Sequence-length curriculum: keyword or truncation by step, in training only."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import zengine
from zengine.features.curriculum import truncate


class Bag(nn.Module):
    """Embeds tokens and predicts the label; notes the lengths that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.lengths: list[int] = []

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        self.lengths.append(tokens.shape[1])
        return self.embed(tokens).square().mean()


class Asking(Bag):
    """Takes the keyword, as DeepSpeed's models do."""

    def forward(self, tokens: torch.Tensor, curriculum_seqlen: int | None = None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(tokens[:, :curriculum_seqlen])


def section(**changes: Any) -> dict[str, Any]:
    base = {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 4,
        "max_difficulty": 16,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 2},
    }
    return {**base, **changes}


def engine_of(model: nn.Module, **config: Any) -> zengine.Engine:
    base = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0}
    return zengine.initialize(model=model, config={**base, **config})[0]


def train(engine: zengine.Engine, steps: int = 6) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        engine.backward(engine(torch.randint(0, 10, (2, 12))))
        losses.append(engine.step().loss)
    return losses


@pytest.mark.parametrize("model", [Bag, Asking])
def test_lengths_follow_the_schedule_by_keyword_or_by_cut(model: type[Bag], caplog: pytest.LogCaptureFixture) -> None:
    """floor(t/4 * 12 + 4) for t = 1..: 7 10 13 16, down to even: 6 10 12 16; the data have 12."""
    with caplog.at_level(logging.WARNING, "zengine"):
        engine = engine_of(model(), curriculum_learning=section())
    assert engine.curriculum_seqlen == 6
    train(engine)
    assert engine.module.lengths == [6, 10, 12, 12, 12, 12]
    how = (
        "passed to forward() as curriculum_seqlen" if model is Asking else "forward() of Bag has no curriculum_seqlen"
    )
    assert how in caplog.text
    engine.eval()
    engine(torch.zeros(2, 12, dtype=torch.long))
    assert engine.module.lengths[-1] == 12
    assert engine.curriculum_enabled_legacy()


def test_off_is_absent_and_the_end_of_the_schedule_changes_no_bit() -> None:
    torch.manual_seed(0)
    start = Bag().state_dict()

    def losses(**config: Any) -> list[float]:
        model = Bag()
        model.load_state_dict(start)
        return train(engine_of(model, **config))

    plain = losses()
    assert losses(curriculum_learning={**section(), "enabled": False}) == plain
    assert losses(curriculum_learning=section(min_difficulty=16)) == plain
    assert losses(curriculum_learning=section()) != plain
    assert engine_of(Bag()).curriculum_seqlen == 0


def test_a_resumed_run_goes_on_in_the_schedule(tmp_path) -> None:
    torch.manual_seed(0)
    first = engine_of(Bag(), curriculum_learning=section())
    train(first, 2)
    first.save_checkpoint(tmp_path)
    second = engine_of(Bag(), curriculum_learning=section())
    second.load_checkpoint(tmp_path)
    assert train(second, 3) == train(first, 3)
    assert second.module.lengths == [12, 12, 12]


def test_a_custom_schedule_comes_from_a_function() -> None:
    engine = engine_of(Bag(), curriculum_learning=section(schedule_type="custom", schedule_config={}))
    with pytest.raises(RuntimeError, match="set_custom_curriculum_learning_schedule"):
        engine(torch.zeros(2, 12, dtype=torch.long))
    engine.set_custom_curriculum_learning_schedule(lambda step: 3 + step)
    train(engine, 3)
    assert engine.module.lengths == [4, 5, 6]
    with pytest.raises(ValueError, match="no curriculum is on"):
        engine_of(Bag()).set_custom_curriculum_learning_schedule(lambda step: 3)


def test_what_is_cut_by_hand() -> None:
    tokens, mask, square = (
        torch.ones(2, 8, dtype=torch.long),
        torch.ones(2, 8, dtype=torch.bool),
        torch.ones(2, 1, 8, 8),
    )
    hidden, label = torch.ones(2, 8, 8), torch.ones(2)
    cut_tokens, other = truncate(
        (tokens, {"mask": mask, "square": square, "hidden": hidden, "label": label, "n": 8}), 3
    )
    assert cut_tokens.shape == (2, 3)
    assert other["mask"].shape == (2, 3)
    assert other["square"].shape == (2, 1, 3, 3)
    assert other["hidden"].shape == (2, 3, 8)
    assert (other["label"].shape, other["n"]) == ((2,), 8)
    same = (tokens, label)
    assert truncate(same, 8) is same
    assert truncate((label,), 1)[0] is label
