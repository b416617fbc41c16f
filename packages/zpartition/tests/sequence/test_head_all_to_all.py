"""Messages: mixed dtypes, uneven heads, and that one direction is the other's transpose."""

from __future__ import annotations

import torch
from torch import Tensor

import zcomm
from zcomm.testing import run_ranks
from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.sequence.head_all_to_all import Dims, to_heads, to_tokens

DIMS = Dims(heads=1, tokens=0)
UNEVEN, SHARED = (range(2), range(2, 3)), (range(2), range(1, 3))  # of 3 heads over 2 ranks


def rand(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _trade() -> list[float]:
    mp_group, mine = ModelParallelGroup.of(None), zcomm.group_rank()
    wholes = [rand(0, 4, 3, 2), rand(1, 4, 3, 5).float()]
    parts = [whole[2 * mine : 2 * mine + 2] for whole in wholes]
    heads = to_heads(parts, (UNEVEN, SHARED), DIMS, mp_group)
    for got, whole, ranges in zip(heads, wholes, (UNEVEN, SHARED)):
        run = ranges[mine]
        assert torch.equal(got, whole[:, run.start : run.stop])
    back = to_tokens(heads, (UNEVEN, SHARED), DIMS, mp_group)
    twice = torch.tensor([1.0, 2.0, 1.0]).view(1, 3, 1)  # two ranks had the head in the middle
    assert torch.equal(back[0], parts[0])
    assert torch.equal(back[1], parts[1] * twice)
    there = to_heads([parts[0]], (SHARED,), DIMS, mp_group)[0]
    other = rand(7 + mine, *there.shape)
    home = to_tokens([other], (SHARED,), DIMS, mp_group)[0]
    return [float((there * other).sum()), float((parts[0] * home).sum())]


def test_heads_are_exchanged_for_tokens_and_return_as_sums() -> None:
    found = run_ranks(_trade, 2)
    forward, backward = (sum(rank[index] for rank in found) for index in (0, 1))
    assert abs(forward - backward) < 1e-12
