"""A loss for each token of whole sequences, and the gradients of their mean."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import zcomm
from zcomm.testing import run_ranks
from zengine.deepspeed.sequence.cross_entropy import vocab_sequence_parallel_cross_entropy


def _compare() -> list[float]:
    rank = zcomm.group_rank()
    torch.manual_seed(0)
    logits = torch.randn(6, 2, 5, requires_grad=True)
    labels = torch.arange(12).view(6, 2) % 5
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(6, 2)
    (wanted,) = torch.autograd.grad(expected.mean(), logits)
    part = logits.detach().chunk(2)[rank].clone().requires_grad_()
    losses = vocab_sequence_parallel_cross_entropy(part, labels.chunk(2)[rank], None)
    losses.mean().backward()
    own = vocab_sequence_parallel_cross_entropy(part, labels.chunk(2)[rank], None, gather_sequence_loss=False)
    with pytest.raises(ValueError, match=r"zpartition\.tensor\.vocabulary_cross_entropy"):
        vocab_sequence_parallel_cross_entropy(part, labels.chunk(2)[rank], None, tp_group=object())
    pairs = [(losses, expected), (own, expected.chunk(2)[rank]), (part.grad / 2, wanted.chunk(2)[rank])]
    return [float((a - b).abs().max().detach()) for a, b in pairs]


def test_losses_are_gathered_and_gradients_are_those_of_the_mean_over_ranks() -> None:
    for found in run_ranks(_compare, 2):
        assert max(found) < 1e-6
