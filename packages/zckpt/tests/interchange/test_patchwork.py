"""A patchwork equals the tensor that torch makes of the same parts, and reads only the requested boxes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from zckpt.interchange import Patchwork


class Counted:
    """A source that counts the elements read."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.numel_read = tensor, 0

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, box: Any) -> Tensor:
        found = self.tensor[box]
        self.numel_read += found.numel()
        return found


def experts(number: int, *shape: int) -> list[Counted]:
    return [Counted(torch.randn(shape)) for _ in range(number)]


def test_experts_that_lie_one_by_one_are_a_stack_of_which_a_rank_reads_its_own() -> None:
    gates, ups = experts(4, 6, 5), experts(4, 6, 5)
    lazy = torch.cat([torch.stack([Patchwork.over(each) for each in part]) for part in (gates, ups)], dim=1)
    assert isinstance(lazy, Patchwork)
    assert lazy.get_shape() == [4, 12, 5]
    whole = torch.cat([torch.stack([each.tensor for each in part]) for part in (gates, ups)], dim=1)
    assert torch.equal(lazy[2:4], whole[2:4])
    assert [each.numel_read for each in (*gates, *ups)] == [0, 0, 30, 30] * 2
    assert torch.equal(lazy[1:2, 3:9, 2:4], whole[1:2, 3:9, 2:4])
    assert [each.numel_read for each in (*gates, *ups)] == [0, 6, 30, 30] * 2
    assert torch.equal(lazy[...], whole)


def random_step(value: Any, rng: random.Random) -> Any:
    """One of torch's functions, with arguments that fit the shape; the same for a tensor and a patchwork."""
    dim = rng.randrange(-value.ndim, value.ndim)
    kind = rng.choice(["cat", "stack", "narrow", "split", "chunk", "unbind", "transpose", "squeeze", "unsqueeze"])
    if kind == "cat":
        return torch.cat([value, value], dim=dim)
    if kind == "stack":
        return torch.stack([value, value], dim=dim) if value.ndim < 5 else value
    if kind == "narrow":
        start = rng.randrange(value.shape[dim])
        length = rng.randint(1, value.shape[dim] - start)
        return torch.narrow(value, dim, rng.choice([start, start - value.shape[dim]]), length)
    if kind == "split":
        first = rng.randint(1, value.shape[dim])
        return rng.choice(torch.split(value, [first, value.shape[dim] - first], dim=dim)[:1])
    if kind == "chunk":
        return rng.choice(torch.chunk(value, rng.randint(1, 3), dim=dim))
    if kind == "unbind":
        return rng.choice(torch.unbind(value, dim)) if value.ndim > 1 else value
    if kind == "transpose":
        return torch.transpose(value, dim0=dim, dim1=rng.randrange(value.ndim)).contiguous()
    if kind == "squeeze":
        return torch.squeeze(value, dim) if value.ndim > 1 else value
    return torch.unsqueeze(value, dim) if value.ndim < 5 else value


@pytest.mark.parametrize("seed", range(60))
def test_any_chain_of_functions_gives_what_torch_gives(seed: int) -> None:
    rng = random.Random(seed)
    value: Any = torch.arange(2 * 3 * 4.0).view(2, 3, 4)
    lazy: Any = Patchwork.over(value)
    for step in range(6):
        choices = f"{seed} {step}"
        value, lazy = (random_step(each, random.Random(choices)) for each in (value, lazy))
        assert lazy.shape == value.shape
    for _ in range(4):
        box = tuple(slice(*sorted(rng.choices(range(size + 1), k=2))) for size in value.shape)
        assert torch.equal(lazy[box], value[box])
        assert torch.equal(lazy[..., box[-1]], value[..., box[-1]])


def test_methods_are_those_of_a_tensor() -> None:
    value = torch.arange(24.0).view(4, 6)
    lazy = Patchwork.over(value)
    assert (lazy.dim(), lazy.size(), lazy.size(-1)) == (2, value.size(), 6)
    for found, expected in zip(lazy.split([1, 3]), value.split([1, 3])):
        assert torch.equal(found[:], expected)
    for found, expected in zip(lazy.chunk(3, dim=1), value.chunk(3, dim=1)):
        assert torch.equal(found.transpose(0, 1).contiguous()[:], expected.t())
    assert torch.equal(lazy.unsqueeze(1)[:], value.unsqueeze(1))
    assert torch.equal(lazy.unbind(1)[2].unsqueeze(0).squeeze(0)[:], value[:, 2])
    assert Patchwork.over(torch.tensor(3.0))[...].item() == 3.0


def test_parts_of_different_dtypes_are_read_in_one_that_holds_both() -> None:
    lazy: Any = torch.cat([Patchwork.over(torch.ones(2, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)])
    assert lazy[:].dtype == torch.float32
    assert lazy[:2].dtype == torch.bfloat16


def test_what_is_not_about_places_is_refused_by_name() -> None:
    lazy: Any = Patchwork.over(torch.ones(2, 3))
    with pytest.raises(TypeError, match=r"torch.exp is not supported .*supported: cat, chunk"):
        torch.exp(lazy)
    with pytest.raises(ValueError, match=r"shapes \[\(2, 3\), \(2, 4\)\] cannot be concatenated along dim 0"):
        torch.cat([lazy, Patchwork.over(torch.ones(2, 4))])
    with pytest.raises(ValueError, match=r"sizes \[1, 4\] do not sum to 3"):
        lazy.split([1, 4], dim=1)
    with pytest.raises(ValueError, match=r"start 2 and length 2 exceed dim [01] of size 3"):
        torch.narrow(lazy, 1, 2, 2)
    for wrong in (torch.unsqueeze, torch.squeeze):
        with pytest.raises(IndexError, match=r"dim 3 is out of range for [23] dims"):
            wrong(lazy, 3)


@pytest.mark.parametrize("box", [slice(None, None, 2), (..., 0), (slice(1),) * 3, (..., slice(1), ...)])
def test_an_index_that_is_no_box_is_refused(box: Any) -> None:
    with pytest.raises(TypeError, match=r"not a box of shape \(2, 3\): pass slices of step 1"):
        Patchwork.over(torch.ones(2, 3))[box]
