"""The model in pipeline stages equals the whole model."""

from __future__ import annotations

import attrs
import pytest
import torch

from train.model import GPT, Shape
from train.pipelined import inputs_and_targets, make_pipeline
from zcomm.testing import run_ranks
from zpartition.pipeline import PipelineModule, PipelineRunner

SMALL = Shape(depth=3, width=32, heads=2, context=16)


def some_windows(count: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (count, SMALL.context + 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def test_one_stage_is_the_model_itself():
    model = GPT(SMALL)
    assert make_pipeline(model, {}) is model


def staged(shape: Shape) -> dict[str, tuple[float, float, torch.Tensor | None]]:
    """Return (found, expected) for the losses in training and evaluation, and for this rank's gradients."""
    whole, model = (GPT(shape, seed=1) for _ in range(2))
    parts = some_windows(8).split((3, 3, 2))
    losses = [whole(part) / 3 for part in parts]
    sum(losses).backward()
    stages = make_pipeline(model, {"pipeline": {"stages": 2}})
    assert isinstance(stages, PipelineModule)
    runner = PipelineRunner.over(stages)
    trained = runner.train_batch(map(inputs_and_targets, parts), 3)
    with torch.no_grad():
        looked = sum(whole.eval()(part) for part in parts) / 3
    stages.eval()
    seen = runner.eval_batch(map(inputs_and_targets, parts), 3)
    found = {"trained": (float(trained), float(sum(losses))), "seen": (float(seen), float(looked))}
    expected = dict(whole.named_parameters())
    for name, param in stages.named_parameters():
        found[name] = (param.grad, expected[name].grad)
    return found


@pytest.mark.parametrize("experts", [0, 4])
def test_stages_have_the_names_losses_and_gradients_of_the_whole_model(experts: int):
    shape = attrs.evolve(SMALL, experts=experts)
    ranks = run_ranks(staged, 2, shape)
    names = [name for found in ranks for name in found if name not in ("trained", "seen")]
    assert sorted(names) == sorted(name for name, _ in GPT(shape).named_parameters())
    for found in ranks:
        for name, (ours, expected) in found.items():
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6, msg=name)
    assert (ranks[0]["trained"][0] - ranks[0]["seen"][0] > 0.005) == (
        experts > 0
    )  # the load-balancing loss counts in training only
