"""A gathered sequence equals the whole, and its gradients come from all ranks."""

from __future__ import annotations

import torch

import zcomm
from zcomm.testing import run_ranks
from zpartition.sequence import gather_sequence


def _gather() -> tuple[list[float], list[float]]:
    mine = zcomm.group_rank()
    x = (torch.arange(2.0) + 2 * mine).view(1, 2).requires_grad_()
    whole = gather_sequence(x, dim=-1)
    (whole * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    return whole.flatten().tolist(), x.grad.flatten().tolist()


def test_tokens_are_joined_and_gradients_summed() -> None:
    for rank, (whole, grad) in enumerate(run_ranks(_gather, 2)):
        assert whole == [0.0, 1.0, 2.0, 3.0]
        assert grad == [[2.0, 4.0], [6.0, 8.0]][rank]
