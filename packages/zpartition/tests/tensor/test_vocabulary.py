"""A split vocabulary: lookups and losses equal torch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import zcomm
from zcomm.testing import run_ranks
from zpartition.tensor import (
    Column,
    Rule,
    TensorPlan,
    Vocabulary,
    parallelize,
    resolve,
    vocabulary_cross_entropy,
)


def make(dtype: torch.dtype) -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"embed": nn.Embedding(7, 4, padding_idx=5), "head": nn.Linear(4, 7)}).to(dtype)


def split(dtype: torch.dtype) -> nn.ModuleDict:
    model = make(dtype)
    parallelize(model, TensorPlan([Rule("embed", Vocabulary()), Rule("head", Column())]))
    return model


def gradients(model: nn.ModuleDict) -> list[Tensor]:
    return [p.grad for p in model.parameters()]


class Scaled(nn.Embedding):
    """Gemma's scaled embedding."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * 3.0


class Alone(nn.Embedding):
    """An embedding with its own lookup."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.embedding(input, self.weight)


def _scaled() -> float:
    tokens, plan = torch.tensor([0, 5, 6, 3, 3]), TensorPlan([Rule("*", Vocabulary())])
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(7, 4).double())
    whole = copy.deepcopy(model)
    expected = whole(tokens)
    (gradient,) = torch.autograd.grad(expected.square().sum(), whole.parameters())
    parallelize(model, plan)
    found = model(tokens)
    found.square().sum().backward()
    assert isinstance(model[0], Scaled)
    rows = slice(0, 4) if zcomm.group_rank() == 0 else slice(4, 7)
    return float((found - expected).abs().max().detach() + (model[0].weight.grad - gradient[rows]).abs().max())


def test_an_embedding_that_scales_its_output_still_does() -> None:
    assert max(run_ranks(_scaled, 2)) < 1e-13


def test_an_embedding_with_its_own_lookup_raises() -> None:
    message = "0 is a Alone, but Vocabulary.. splits only torch's Embedding and subclasses that call its forward"
    with pytest.raises(ValueError, match=message):
        resolve(TensorPlan([Rule("*", Vocabulary())]), nn.Sequential(Alone(7, 4)), 2, 0)


def _compare() -> list[float]:
    tokens, labels = torch.tensor([0, 5, 6, 3, 3]), torch.tensor([6, 0, -100, 3, 2])
    found = []
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.bfloat16, 0.02)):
        whole, ours = make(dtype), split(dtype)
        loss = cross_entropy(whole["head"](whole["embed"](tokens)).double(), labels)
        loss.backward()
        logits = ours["head"](ours["embed"](tokens))
        mine = vocabulary_cross_entropy(logits, labels, ours["head"])
        mine.backward()
        rows = slice(0, 4) if zcomm.group_rank() == 0 else slice(4, 7)
        pairs = zip(gradients(whole), gradients(ours))
        worst = max(float((a[rows] - b).abs().max()) for a, b in pairs)
        found.append(max(worst, abs(float(mine.detach() - loss.detach()))) / tolerance)
        for reduction in ("sum", "none"):
            expected = cross_entropy(whole["head"](whole["embed"](tokens)).double(), labels, reduction=reduction)
            got = vocabulary_cross_entropy(logits.detach(), labels, ours["head"], reduction=reduction)
            found.append(float((expected - got).detach().abs().max()) / tolerance / 4)
    with pytest.raises(IndexError, match="token 7 is outside the vocabulary, 0 to 6"):
        ours["embed"](torch.tensor([1, 7]))
    with pytest.raises(ValueError, match=r"labels range from 1 to 9; allowed are 0 to 6, and ignore_index=-100"):
        vocabulary_cross_entropy(logits, torch.tensor([1, 2, 9, 1, 1]), ours["head"])
    with pytest.raises(ValueError, match=r"\[5, 7\] are not \(tokens, \d\), this rank's part of a vocabulary of 7"):
        vocabulary_cross_entropy(torch.zeros(5, 7), labels, ours["head"])
    return found


def test_losses_and_gradients_equal_torch() -> None:
    for found in run_ranks(_compare, 2):
        assert max(found) < 1, found
