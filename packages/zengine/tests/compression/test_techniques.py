"""Arithmetic of the techniques: masks, scores, ranges, and their gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from zengine.compression.techniques import (
    ChannelMask,
    HeadMask,
    RoundInput,
    RowMask,
    SparseMask,
    keep_neighbours,
    keep_share,
)
from zprecision.quant import round_to_bits


def linear(rows: int = 6, columns: int = 8, seed: int = 1) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(columns, rows)


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.5, 1.0])
def test_the_largest_share_is_kept(ratio: float) -> None:
    values = torch.randn(7, 9, generator=torch.Generator().manual_seed(3))
    mask = keep_share(values, ratio)
    kept = math.ceil(ratio * 63)
    assert int(mask.sum()) == kept
    assert values[mask].min() >= values.flatten().sort(descending=True).values[kept - 1]


def test_of_equal_values_the_first_are_kept() -> None:
    assert keep_share(torch.ones(4), 0.5).tolist() == [True, True, False, False]
    assert keep_neighbours(torch.ones(1, 8), 2, 4).tolist() == [[True, True, False, False] * 2]


def test_two_of_four_neighbours_are_kept() -> None:
    values = torch.randn(5, 12, generator=torch.Generator().manual_seed(3)).abs()
    groups, mask = values.view(-1, 4), keep_neighbours(values, 2, 4).view(-1, 4)
    assert (mask.sum(1) == 2).all()
    for group, chosen in zip(groups, mask, strict=True):
        assert group[chosen].min() > group[~chosen].max()


@pytest.mark.parametrize(
    ("technique", "shape"),
    [
        (SparseMask(offset=0, ratio=0.25, is_learned=True), (6, 8)),
        (RowMask(offset=0, ratio=0.5, is_learned=True), (6, 1)),
        (HeadMask(offset=0, ratio=0.5, is_learned=True, heads=4), (1, 4)),
    ],
)
def test_scores_have_the_gradient_of_their_mask(technique: RowMask, shape: tuple[int, ...]) -> None:
    layer = linear()
    technique.prepare(layer)
    scores = layer.get_parameter(technique.scores_name)
    assert scores.shape == shape
    slope = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))
    weight = technique.weight(layer, layer.weight)
    (weight * slope).sum().backward()
    mask = keep_share(scores, technique.ratio).to(weight.dtype)
    wide = technique.spread(mask, layer.weight)
    assert torch.equal(weight, layer.weight * wide)
    assert torch.equal(layer.weight.grad, slope * wide)
    spread = torch.ones(6, 8)
    _, wanted = torch.autograd.functional.vjp(
        lambda mask: technique.spread(mask, layer.weight) * spread, mask.detach(), slope * layer.weight.detach()
    )
    torch.testing.assert_close(scores.grad, wanted)


def test_rows_and_their_biases_go_by_the_sum_of_magnitudes() -> None:
    layer = linear()
    technique = RowMask(offset=0, ratio=0.5, is_learned=False)
    technique.prepare(layer)
    kept = layer.weight.abs().sum(1).topk(3).indices.sort().values
    assert layer.row_pruning_mask.view(-1).nonzero().view(-1).tolist() == kept.tolist()
    weight, bias = technique.weight(layer, layer.weight), technique.bias(layer, layer.bias)
    others = [row for row in range(6) if row not in kept.tolist()]
    assert not weight[others].any()
    assert not bias[others].any()
    assert torch.equal(weight[kept], layer.weight[kept])
    technique.release(layer)
    assert sorted(layer.state_dict()) == ["bias", "weight"]


def test_channels_go_by_the_sum_of_magnitudes() -> None:
    torch.manual_seed(1)
    layer = nn.Conv2d(2, 6, 3)
    technique = ChannelMask(offset=0, ratio=0.5, is_learned=False)
    technique.prepare(layer)
    kept = set(layer.weight.abs().sum((1, 2, 3)).topk(3).indices.tolist())
    weight = technique.weight(layer, layer.weight)
    assert {channel for channel in range(6) if weight[channel].any()} == kept
    assert {channel for channel in range(6) if technique.bias(layer, layer.bias)[channel]} == kept


def test_heads_are_columns() -> None:
    layer = linear()
    technique = HeadMask(offset=0, ratio=0.5, is_learned=True, heads=4)
    technique.prepare(layer)
    layer.head_pruning_scores.data = torch.tensor([[1.0, 4.0, 3.0, 2.0]])
    weight = technique.weight(layer, layer.weight)
    assert torch.equal(weight[:, 2:6], layer.weight[:, 2:6])
    assert not weight[:, :2].any()
    assert not weight[:, 6:].any()


def test_a_mask_that_follows_is_of_the_present_weights_and_passes_gradients_to_all() -> None:
    layer = linear()
    technique = SparseMask(offset=0, ratio=0.5, is_learned=False, follows=True)
    technique.prepare(layer)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(48.0).view(6, 8))
    weight = technique.weight(layer, layer.weight)
    assert not weight[:3].any()
    assert torch.equal(weight[3:], layer.weight[3:])
    weight.sum().backward()
    assert torch.equal(layer.weight.grad, torch.ones(6, 8))
    assert sorted(layer.state_dict()) == ["bias", "weight"]


def test_each_token_has_a_scale() -> None:
    layer = linear()
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    technique = RoundInput(offset=0, bits=8, kind="symmetric", is_static=False)
    whole = technique.input(layer, x)
    for row, rounded in zip(x.view(-1, 8), whole.view(-1, 8), strict=True):
        assert torch.equal(technique.input(layer, row), rounded)


def test_a_static_range_begins_with_the_first_batch_and_follows_training_alone() -> None:
    layer = linear()
    technique = RoundInput(offset=0, bits=8, kind="asymmetric", is_static=True)
    technique.prepare(layer)
    technique.input(layer, torch.tensor([-1.0, 3.0]))
    assert layer.activation_limits.tolist() == [-1.0, 3.0]
    technique.input(layer, torch.tensor([-3.0, 1.0]))
    torch.testing.assert_close(layer.activation_limits, torch.tensor([-1.1, 2.9]))  # momentum 0.95
    before = layer.activation_limits.clone()
    layer.eval()
    rounded = technique.input(layer, torch.tensor([-10.0, 0.5, 10.0]))
    assert torch.equal(layer.activation_limits, before)
    assert -1.2 < rounded[0] < -1.0
    assert 2.8 < rounded[2] < 3.0


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_before_training_a_static_range_is_that_of_the_input(kind: Any) -> None:
    layer = linear().eval()
    technique = RoundInput(offset=0, bits=8, kind=kind, is_static=True)
    technique.prepare(layer)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(technique.input(layer, x), round_to_bits(x, 8, kind=kind))
    assert layer.activation_limits.tolist() == [0.0, 0.0]
