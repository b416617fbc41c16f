"""Gradient statistics: the norm in float64, and finiteness."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from zoptim import AdamW, grad_stats, sum_of_squares
from zoptim.backends import native, select
from zoptim.backends.stats import stats_of_params
from zoptim.backends.watch import gradients

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(params=["kernel", "torch"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """With the C kernels and without."""
    if request.param == "kernel":
        yield
    else:
        with native.use_level("none"):
            yield


def make_grads(dtype: torch.dtype = torch.float32, numels: tuple[int, ...] = (7, 0, 40_000, 1)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=generator, dtype=torch.float64).to(dtype) for n in numels]


def norm_of(grads: list[Tensor]) -> float:
    return math.sqrt(math.fsum((grad.double() ** 2).sum().item() for grad in grads))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_that_of_float64_to_1e_7(dtype: torch.dtype, way: None) -> None:
    grads = make_grads(dtype)
    stats = grad_stats(grads)
    assert (stats.norm.shape, stats.norm.dtype) == ((), torch.float64)
    assert (stats.found_inf.shape, stats.found_inf.dtype, stats.found_inf.item()) == ((), torch.float32, 0.0)
    assert stats.norm.item() == pytest.approx(norm_of(grads), rel=1e-7)


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-20, 1e-13, 1e18, 1e20, 1e38])
def test_no_square_overflows_or_vanishes(size: float, way: None) -> None:
    grads = [grad * size for grad in make_grads()]
    grads = [grad.clamp(-3e38, 3e38) for grad in grads]
    assert grad_stats(grads).norm.item() == pytest.approx(norm_of(grads), rel=1e-7)
    assert grad_stats(grads).found_inf.item() == 0.0


def test_dtypes_may_be_mixed_and_gradients_missing(way: None) -> None:
    grads = [grad for dtype in DTYPES for grad in make_grads(dtype)]
    stats = grad_stats(iter([None, *grads, None]))
    assert stats.norm.item() == pytest.approx(norm_of(grads), rel=1e-7)


@pytest.mark.parametrize("grads", [[], [None, None], [torch.ones(0)]])
def test_nothing_has_norm_zero_and_is_finite(grads: list[Tensor | None], way: None) -> None:
    stats = grad_stats(grads)
    assert (stats.norm.item(), stats.found_inf.item()) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("position", [0, 1023, 16_384, 39_999])
def test_one_value_that_is_not_finite_is_found_anywhere(
    dtype: torch.dtype, bad: float, position: int, way: None
) -> None:
    grads = make_grads(dtype)
    grads[2][position] = bad
    stats = grad_stats(grads)
    assert stats.found_inf.item() == 1.0
    assert not math.isfinite(stats.norm.item())


def test_the_largest_finite_float32_values_do_not_overflow(way: None) -> None:
    largest = torch.finfo(torch.float32).max
    stats = grad_stats([torch.full((100,), largest), torch.full((5,), -largest)])
    assert stats.found_inf.item() == 0.0
    assert stats.norm.item() == pytest.approx(largest * math.sqrt(105), rel=1e-12)


def test_tiny_values_are_not_lost_beside_large_ones(way: None) -> None:
    """float32 sums lose them: each of 2**20 ones added to 4096 is below an ulp."""
    grads = [torch.tensor([4096.0]), torch.full((1 << 20,), 1e-3)]
    assert grad_stats(grads).norm.item() == pytest.approx(norm_of(grads), rel=1e-13)


@pytest.mark.parametrize(
    "grad",
    [
        torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).t(),
        torch.randn(12, 8, generator=torch.Generator().manual_seed(1))[::2, ::2],
        torch.ones(()).expand(5, 5),
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor(3.0),
        torch.ones(4, requires_grad=True),
    ],
    ids=["transposed", "holes", "expanded", "channels last", "scalar", "requires grad"],
)
def test_layout_does_not_matter(grad: Tensor, way: None) -> None:
    assert grad_stats([grad]).norm.item() == pytest.approx(norm_of([grad.detach()]), rel=1e-14)


def test_gradients_are_only_read(way: None) -> None:
    grads = make_grads()
    before = [grad.clone() for grad in grads]
    grad_stats(grads)
    assert all(torch.equal(a, b) for a, b in zip(grads, before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_instruction_sets_and_repetition_change_no_bit(dtype: torch.dtype) -> None:
    grads, found = make_grads(dtype, (100_000, 3, 70_001)), set()
    for level in select.kernels().levels:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with native.use_level(level):
                found.add(grad_stats(grads).norm.item())
    assert len(found) == 1


# The divisor ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e6])
@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_dividing_by_the_divisor_unscales_and_clips_as_torch_does(
    max_norm: float, loss_scale: float, way: None
) -> None:
    params = [torch.zeros_like(grad).requires_grad_() for grad in make_grads()]
    for param, grad in zip(params, make_grads()):
        param.grad = grad.clone()
    expected_norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
    scaled = [grad * loss_scale for grad in make_grads()]
    stats = grad_stats(scaled)
    divisor = stats.divisor(max_norm=max_norm, loss_scale=loss_scale)
    assert (divisor.shape, divisor.dtype) == ((), torch.float32)
    assert stats.norm.item() / loss_scale == pytest.approx(expected_norm.item(), rel=1e-5)
    for param, grad in zip(params, scaled):
        torch.testing.assert_close(grad / divisor, param.grad, rtol=2e-6, atol=0)


def test_without_clipping_the_divisor_is_the_scale(way: None) -> None:
    stats = grad_stats(make_grads())
    assert stats.divisor().item() == 1.0
    assert stats.divisor(loss_scale=512.0).item() == 512.0
    assert stats.divisor(loss_scale=torch.tensor([512.0]).squeeze(), max_norm=0).item() == 512.0


def test_the_scale_may_be_a_tensor() -> None:
    stats = grad_stats([torch.full((4,), 8.0)])  # norm 16
    assert stats.divisor(max_norm=1.0, loss_scale=torch.tensor(8.0)).item() == pytest.approx(8.0 * 2.000001)
    assert stats.divisor(max_norm=1.0, loss_scale=8.0).item() == pytest.approx(8.0 * 2.000001)


@pytest.mark.parametrize("grad", [3.0, 1e-3, 1e19, math.inf, math.nan, 0.0])
@pytest.mark.parametrize("loss_scale", [1.0, 0.1, 65536.0])
def test_a_scale_gives_the_same_bits_as_a_number_and_as_a_tensor(grad: float, loss_scale: float) -> None:
    stats = grad_stats([torch.full((7,), grad)])
    by_number = stats.divisor(max_norm=0.7, loss_scale=loss_scale)
    by_tensor = stats.divisor(max_norm=0.7, loss_scale=torch.tensor(loss_scale, dtype=torch.float64))
    assert by_number.dtype is torch.float32
    assert by_number.shape == by_tensor.shape == ()
    assert torch.equal(by_number.view(1).view(torch.int32), by_tensor.view(1).view(torch.int32)) or grad != grad
    assert by_number.isnan() == by_tensor.isnan()


def test_a_norm_below_the_limit_divides_by_the_scale_alone() -> None:
    assert grad_stats([torch.full((4,), 0.1)]).divisor(max_norm=1.0, loss_scale=4.0).item() == 4.0


@pytest.mark.parametrize(
    ("bad", "error"), [(-1.0, ValueError), (math.nan, ValueError), ("1", TypeError), (None, TypeError)]
)
def test_an_invalid_max_norm_raises_with_its_name(bad: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"max_norm is .*; it must be a number in \[0, inf\)"):
        grad_stats([torch.ones(3)]).divisor(max_norm=bad)


# Refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (torch.ones(3).to_sparse(), TypeError, r"gradient 1 is torch\.sparse_coo torch\.float32; it must be dense"),
        (torch.ones(3, dtype=torch.int32), TypeError, r"gradient 1 is torch\.strided torch\.int32"),
        (torch.ones(3, dtype=torch.complex64), TypeError, r"gradient 1 is torch\.strided torch\.complex64"),
        (torch.ones(3, device="meta"), ValueError, r"gradient 1 is on meta, gradient 0 on cpu; use one device"),
    ],
)
def test_gradients_that_do_not_fit_raise_by_index(bad: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        grad_stats([torch.ones(2), bad])


@pytest.mark.parametrize("numel", [0, 5, 100_000])
def test_a_sum_of_squares_is_that_of_the_norm(numel: int) -> None:
    grads = [torch.randn(numel), torch.randn(3, 4).bfloat16(), torch.randn(7, dtype=torch.float64)]
    expected = sum(grad.double().square().sum() for grad in grads)
    assert float(sum_of_squares(grads)) == pytest.approx(float(expected), rel=1e-6)
    assert sum_of_squares(grads).sqrt() == grad_stats(grads).norm
    assert sum_of_squares([]) == 0


class WithItsOwnGrad(torch.nn.Parameter):
    """Shows another gradient than autograd has recorded."""

    @property
    def grad(self) -> Tensor:  # type: ignore[override]
        return torch.full((3,), 2.0)


def params_of(case: str) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters, and the tensors whose gradients are read."""
    params = [torch.ones(4, 3), torch.ones(70_000), torch.ones(5), torch.ones(())]
    for param in params:
        param.grad = torch.randn(param.shape)
    params[2].grad = None
    weights = params
    if case == "mirrored":
        weights = [*params[:2], torch.ones(5, dtype=torch.bfloat16), params[3]]
        weights[2].grad = torch.randn(5).bfloat16()
    elif case == "in another layout":
        params[0].grad = torch.randn(3, 4).t()
    elif case == "of many dims":
        params[0] = torch.ones(1, 2, 1, 1, 1, 3)
        params[0].grad = torch.randn(1, 2, 1, 1, 1, 3)
    elif case == "empty":
        params[2] = torch.ones(0, 4)
        params[2].grad = torch.ones(0, 4)
    elif case == "a class's own":
        params[2] = WithItsOwnGrad(torch.ones(3))
    elif case == "none":
        for param in params:
            param.grad = None
    return params, weights


CASES = ["plain", "mirrored", "in another layout", "of many dims", "empty", "a class's own", "none"]


@pytest.mark.parametrize("case", CASES)
def test_parameters_have_the_statistics_of_their_gradients(case: str, way: None) -> None:
    lists = [params_of(case), params_of("plain")]
    found = stats_of_params(lists)
    expected = grad_stats(grad for params, weights in lists for grad in gradients(params, weights))
    assert (found.norm, found.found_inf) == (expected.norm, expected.found_inf)
    assert found.norm.item() > 0


def test_an_optimizer_measures_what_its_step_reads(way: None) -> None:
    params, weights = params_of("mirrored")
    optimizer = AdamW([{"params": params[:2]}, {"params": params[2:]}])
    optimizer.mirror(params[2], weights[2])
    assert optimizer.grad_stats().norm == grad_stats(gradients(params, weights)).norm
    params[1].grad = torch.full((70_000,), math.inf)
    assert optimizer.grad_stats().found_inf == 1.0
    params[1].grad = torch.ones(70_000).to_sparse()
    with pytest.raises(TypeError, match=r"gradient 1 is torch\.sparse_coo"):
        optimizer.grad_stats()
