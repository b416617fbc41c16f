"""A sequence's loss and gradients do not depend on how its tokens are split."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import zcomm
from zcomm.testing import run_ranks
from zpartition.sequence import mean_over_sequence, sequence_cross_entropy


def _compare() -> list[float]:
    rank, size = zcomm.group_rank(), zcomm.group_size()
    torch.manual_seed(0)
    logits = torch.randn(2, 6, 5, dtype=torch.float64, requires_grad=True)
    uneven = torch.tensor([[1, 2, -100, 3, -100, -100], [0, -100, -100, 1, -100, 4]])
    one_has_none = torch.tensor([[1, 2, 4, -100, -100, -100], [0, 2, -100, -100, -100, -100]])
    found = []
    for labels in (uneven, one_has_none):
        expected = cross_entropy(logits.flatten(0, 1), labels.flatten())
        (wanted,) = torch.autograd.grad(expected, logits)
        part = logits.detach().chunk(size, 1)[rank].clone().requires_grad_()
        loss = sequence_cross_entropy(part, labels.chunk(size, 1)[rank])
        loss.backward()
        found.append(float((loss - expected).detach().abs()))
        found.append(float((part.grad / size - wanted.chunk(size, 1)[rank]).abs().max()))
    nothing = sequence_cross_entropy(part, torch.full((2, 6 // size), -100))
    nothing.backward()
    found.append(float(nothing.detach()))
    narrow = sequence_cross_entropy(part.detach().bfloat16(), labels.chunk(size, 1)[rank])
    assert narrow.dtype == torch.float32
    assert float(mean_over_sequence(torch.tensor(3.0), 2)) == 1.5
    with pytest.raises(ValueError, match=r"labels of shape \[2, 6\] are not of the same tokens"):
        sequence_cross_entropy(part, labels)
    return found


def test_losses_are_means_over_all_counted_tokens() -> None:
    for found in run_ranks(_compare, 2):
        assert max(found) < 1e-14
