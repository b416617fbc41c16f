from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from zengine.inference.exact.operators import _parts, activate, linear, normalize
from zengine.inference.exact.products import Products
from zengine.inference.matching import gelu_tanh, quick_gelu, squared_relu
from zengine.inference.structure import Norm

DTYPES = [torch.float32, torch.bfloat16]
both = pytest.mark.parametrize("dtype", DTYPES)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@both
@pytest.mark.parametrize("act", [F.silu, F.gelu, gelu_tanh, F.relu, quick_gelu, squared_relu, torch.tanh])
def test_an_activation_does_not_depend_on_the_place(act: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = draw(70_001, dtype=dtype) * 3
    whole = activate(act, x)
    assert torch.equal(torch.cat([activate(act, part) for part in x.split(7 * 64 + 1)]), whole)
    alone = [activate(act, x[at : at + 1]) for at in (*range(40), 16_383, 33_333, 70_000)]
    assert torch.equal(torch.cat(alone), whole[[*range(40), 16_383, 33_333, 70_000]])
    assert torch.allclose(whole.double(), act(x.double()), rtol=1e-5 if dtype == torch.float32 else 3e-2, atol=1e-5)


@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_an_activation_does_not_depend_on_threads(num_threads: int) -> None:
    x, before = draw(300_007), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        wanted = [activate(act, x) for act in (F.silu, F.gelu, gelu_tanh)]
        torch.set_num_threads(num_threads)
        found = [activate(act, x) for act in (F.silu, F.gelu, gelu_tanh)]
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("num_threads", [1, 2, 3, 16, 63, 64, 96])
def test_threads_share_parts_in_whole_vectors(num_threads: int) -> None:
    for count in (64, 16_384, 16_448, 32_832, 100_032, 640_000, 9_999_936):
        parts = _parts(count, num_threads)
        assert sum(parts) == count
        for part in parts:
            for sharing in {min(num_threads, -(-part // 32_768)), num_threads if part > 16_384 else 1}:
                assert -(-part // sharing) % 64 == 0, (count, part, sharing)
        assert len(parts) < 4 * num_threads + 3


@both
@pytest.mark.parametrize("is_centered", [False, True])
@pytest.mark.parametrize("width", [7, 64, 100, 40_000])
def test_a_norm_is_that_of_a_row_alone(dtype: torch.dtype, is_centered: bool, width: int) -> None:
    bias = draw(width, dtype=dtype, seed=2) if is_centered else None
    norm = Norm(weight=draw(width, dtype=dtype, seed=1), bias=bias, eps=1e-5, is_centered=is_centered, offset=0.5)
    x = draw(2, 19, width, dtype=dtype)
    whole = normalize(norm, x)
    assert torch.allclose(whole.float(), norm(x).float(), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert torch.equal(torch.stack([normalize(norm, x[1, at]) for at in range(19)]), whole[1])


@both
def test_gradients_of_a_linear_layer_are_those_of_torch(dtype: torch.dtype) -> None:
    x, weight, bias = (draw(*shape, dtype=dtype).requires_grad_() for shape in ((3, 37, 24), (50, 24), (50,)))
    above = draw(3, 37, 50, dtype=dtype, seed=1)
    found = torch.autograd.grad(linear(Products(), x, weight, bias), (x, weight, bias), above)
    wide = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
    wanted = torch.autograd.grad(F.linear(*wide), wide, above.double())
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() / other.norm() < (1e-6 if dtype == torch.float32 else 6e-3)


def test_the_gradient_of_a_row_does_not_depend_on_the_batch() -> None:
    products, weight = Products(), draw(50, 24)
    x, above = draw(9, 37, 24).requires_grad_(), draw(9, 37, 50, seed=1)
    (whole,) = torch.autograd.grad(linear(products, x, weight), x, above)
    alone = x.detach()[4:5].requires_grad_()
    (found,) = torch.autograd.grad(linear(products, alone, weight), alone, above[4:5])
    assert torch.equal(found[0], whole[4])


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, weight = draw(5, 24).requires_grad_(), draw(50, 24)
    linear(Products(), x, weight).sum().backward()
    assert weight.grad is None
    assert x.grad is not None
