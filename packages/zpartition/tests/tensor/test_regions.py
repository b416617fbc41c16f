"""Converted modules between split layers compute the same, and keep their parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import zcomm
from zcomm.testing import run_ranks
from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.tensor.layers import gather_output, scatter_output, sum_gradients
from zpartition.tensor.parallel_region import ParallelRegion


class Odd(nn.Module):
    """A custom norm that returns two values."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return x * self.gain + self.shift, "kept"


def _grads() -> tuple[list[float], int]:
    parallel_region = ParallelRegion(ModelParallelGroup.of(None), 0)
    norm, start, finish = Odd(), Odd(), Odd()
    sum_gradients(norm, parallel_region, gathers=True)
    scatter_output(start, parallel_region)
    gather_output(finish, parallel_region)
    gain = norm.gain
    records: list[zcomm.Record] = []
    x = torch.arange(12.0).view(4, 3)
    mine = start(x)[0]
    assert mine.shape == (2, 3)
    assert torch.equal(finish(mine)[0], x)
    with zcomm.traced(records.append):
        out, kept = norm(mine)
        assert torch.equal(out, x)
        assert kept == "kept"
        assert norm.gain is gain
        (out * (1 + zcomm.group_rank())).sum().backward()
    shared = [record for record in records if record.label == "gradients of shared weights"]
    return gain.grad.tolist(), len(shared)


def test_gradients_are_summed_in_one_message() -> None:
    for grads, num_messages in run_ranks(_grads, 2):
        assert grads == [3 * (0 + 3 + 6 + 9), 3 * (1 + 4 + 7 + 10), 3 * (2 + 5 + 8 + 11)]
        assert num_messages == 1


def test_one_rank_leaves_a_norm_unchanged() -> None:
    norm = nn.LayerNorm(3)
    sum_gradients(norm, ParallelRegion(ModelParallelGroup.of(None)), gathers=False)
    assert isinstance(norm, nn.LayerNorm)
    norm(torch.ones(2, 3)).sum().backward()
    assert norm.bias.grad.tolist() == [2.0] * 3
