"""Each forward's backward is its transpose over all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import zcomm
from zcomm.testing import run_ranks
from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.tensor import functions


def rand(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def over_ranks(number: Tensor) -> float:
    return sum(zcomm.all_gather_object(float(number.detach())))


def _pairs() -> dict[str, tuple[float, float]]:
    """Return (sum over ranks of <f(x), y>, sum over ranks of <x, f'(y)>) for functions of different values."""
    mp_group, mine = ModelParallelGroup.of(None), zcomm.group_rank()
    found = {}
    for name, call, shape in [
        ("gather_tokens", lambda x: functions.gather_tokens(x, mp_group, 1), (2, 3, 4)),
        ("reduce_scatter_tokens", lambda x: functions.reduce_scatter_tokens(x, mp_group, 1), (2, 6, 4)),
        ("reduce_scatter_tokens 0", lambda x: functions.reduce_scatter_tokens(x, mp_group, 0), (6, 4)),
    ]:
        x = rand(mine, *shape).requires_grad_()
        out = call(x)
        y = rand(10 + mine, *out.shape)
        out.backward(y)
        found[name] = (over_ranks((out * y).sum()), over_ranks((x * x.grad).sum()))
    return found


def _values() -> None:
    """Compare forward and backward of the others with their definitions."""
    mp_group, mine = ModelParallelGroup.of(None), zcomm.group_rank()
    parts, sizes = [rand(seed, 2, 3 - seed) for seed in (0, 1)], (3, 2)
    whole = torch.cat(parts, 1)
    x = parts[mine].clone().requires_grad_()
    joined = functions.join_features(x, mp_group, sizes)
    assert torch.equal(joined, whole)
    joined.backward(whole)
    assert torch.equal(x.grad, parts[mine])
    x = whole.clone().requires_grad_()
    own = functions.slice_features(x, mp_group, sizes)
    assert torch.equal(own, parts[mine])
    own.backward(parts[mine])
    assert torch.equal(x.grad, whole)
    tokens = rand(3, 4, 2).requires_grad_()
    half = functions.slice_tokens(tokens, mp_group, 0)
    assert torch.equal(half, tokens[2 * mine : 2 * mine + 2])
    functions.join_tokens(half, mp_group, 0).backward(tokens.detach())
    assert torch.equal(tokens.grad, tokens)
    x = parts[0].clone().requires_grad_()
    functions.copy(x, mp_group).backward(rand(mine, *x.shape))
    assert torch.equal(x.grad, rand(0, *x.shape) + rand(1, *x.shape))
    x = rand(mine, 2, 2).requires_grad_()
    total = functions.reduce(x * 1, mp_group)
    assert torch.equal(total, rand(0, 2, 2) + rand(1, 2, 2))
    total.backward(torch.ones(2, 2, dtype=torch.float64))
    assert bool((x.grad == 1).all())
    a, b = torch.ones(3, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    first, second = functions.copy_all([a, b], mp_group)
    (first.sum() + (mine + 1) * second.sum()).backward()
    assert a.grad.tolist() == [2.0] * 3
    assert bool((b.grad == 3).all())
    with pytest.raises(ValueError, match=r"3 tokens \(dim 1 of shape \[1, 3\]\).* multiple of 2"):
        functions.slice_tokens(torch.ones(1, 3), mp_group, 1)


def _all() -> dict[str, tuple[float, float]]:
    _values()
    return _pairs()


def test_backwards_are_transposes() -> None:
    for found in run_ranks(_all, 2):
        for name, (forward, backward) in found.items():
            assert forward == pytest.approx(backward, abs=1e-12), name


def test_one_rank_changes_nothing() -> None:
    mp_group, x = ModelParallelGroup.of(None), rand(0, 2, 3, 4)
    for out in (
        functions.copy(x, mp_group),
        functions.reduce(x.clone(), mp_group),
        functions.gather_tokens(x, mp_group, 1),
        functions.reduce_scatter_tokens(x, mp_group, 1),
        functions.slice_tokens(x, mp_group, 1),
        functions.join_tokens(x, mp_group, 1),
        functions.slice_features(x, mp_group, (4,)),
        functions.join_features(x, mp_group, (4,)),
    ):
        assert torch.equal(out, x)
