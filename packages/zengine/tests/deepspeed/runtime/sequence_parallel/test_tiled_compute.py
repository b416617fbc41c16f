"""Tiled computation, called as DeepSpeed's autograd functions are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from zengine.deepspeed.runtime.sequence_parallel.tiled_compute import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 7)


def mlp(self: Model, x: Tensor) -> Tensor:
    return self.down(torch.relu(self.up(x)))


def loss(self: Model, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    losses = cross_entropy(self.head(x), y, reduction="none")
    return losses.mean() if mask is None else (losses * mask).sum()


def gradients(out: Tensor, model: Model, x: Tensor) -> list[Tensor]:
    leaves = [x, *model.parameters()]
    return [grad for grad in torch.autograd.grad(out, leaves, allow_unused=True) if grad is not None]


def assert_equal(ours: Tensor, expected: Tensor, model: Model, x: Tensor) -> None:
    torch.testing.assert_close(ours, expected)
    for a, b in zip(gradients(ours.sum(), model, x), gradients(expected.sum(), model, x), strict=True):
        torch.testing.assert_close(a, b)


def test_an_mlp_and_a_loss_in_tiles_are_those_of_the_whole() -> None:
    model, x, y = Model(), torch.randn(2, 6, 4, requires_grad=True), torch.arange(12).view(2, 6) % 7
    assert_equal(TiledMLP.apply(mlp, model, x, 3, list(model.parameters())), mlp(model, x), model, x)
    flat = TiledMLP.apply(mlp, model, x[0], 2)
    assert_equal(flat, mlp(model, x[0]), model, x)
    whole = loss(model, x.flatten(0, 1), y.flatten())
    assert_equal(TiledFusedLogitsLoss.apply(loss, model, x, y, None, 4, [model.head.weight], "mean"), whole, model, x)
    mask = (y > 2).float()
    masked = loss(model, x.flatten(0, 1), y.flatten(), mask.flatten())
    assert_equal(TiledFusedLogitsLoss.apply(loss, model, x, y, mask, 5, None, "sum"), masked, model, x)


@pytest.mark.parametrize("reduction", [None, "mean", "sum"])
def test_any_computation_in_tiles_is_that_of_the_whole(reduction: Any) -> None:
    model, x = Model(), torch.randn(2, 6, 4, requires_grad=True)

    def compute(hidden: Tensor, shift: float) -> Tensor:
        return mlp(model, hidden) + shift

    expected = compute(x, 0.5)
    reduced = expected if reduction is None else getattr(expected, reduction)()
    ours = SequenceTiledCompute.apply(compute, 6, 3, ["hidden"], ["shift"], "hidden", None, 1, reduction, x, 0.5)
    assert_equal(ours, reduced, model, x)


def test_losses_of_tiles_are_stacked() -> None:
    model, x = Model(), torch.randn(2, 6, 4, requires_grad=True)
    ours = sequence_tiled_compute(lambda h: mlp(model, h).sum(), 6, 3, {"h": x}, {}, "h", None, 0, None)
    assert ours.shape == (3,)
    assert_equal(ours.sum(), mlp(model, x).sum(), model, x)


def test_mistakes_are_told() -> None:
    model, x, y = Model(), torch.randn(2, 6, 4), torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"seqlen=5.*h \[2, 6, 4\]"):
        sequence_tiled_compute(lambda h: h, 5, 2, {"h": x}, {}, "h")
    with pytest.raises(ValueError, match="output_reduction='max'"):
        sequence_tiled_compute(lambda h: h, 6, 2, {"h": x}, {}, "h", output_reduction="max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[2, 6, 4\], \[2, 5\]: they must be \(batch, tokens"):
        TiledFusedLogitsLoss.apply(loss, model, x, y, None, 2)
