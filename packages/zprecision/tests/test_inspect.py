"""One-pass inspection of gradients, the clip divisor, and the search for the first non-finite tensor."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from zprecision import NonFiniteGradient, clip_divisor, divisor_of, first_nonfinite, inspect
from zprecision.backends import native

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# Around the length of a row, of a scratch chunk, and of the threshold between the exact and the row-wise sum.
LENGTHS = [0, 1, 3, 1023, 1024, 1025, 2**15, 2**15 + 1, 2**18 - 1, 2**18, 2**18 + 1, 2**18 + 1024 * 3 + 5]


@pytest.fixture(scope="module", params=["kernel", "torch"], autouse=True)
def summed_by(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test runs with the kernel, if there is one, and without."""
    if request.param == "kernel":
        yield "torch" if native.library() is None else "kernel"
    else:
        with native.use_level("none"):
            yield "torch"


def random(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator).to(dtype)


def exact_norm(*grads: Tensor) -> float:
    """Correctly rounded sum of squares on the host."""
    return math.sqrt(math.fsum(x * x for grad in grads for x in grad.double().flatten().tolist()))


class Counted:
    """An all_reduce of a world of one that counts its calls."""

    def __init__(self) -> None:
        self.vectors: list[Tensor] = []

    def __call__(self, vector: Tensor) -> None:
        self.vectors.append(vector.clone())


def on_ranks(rank_grads: list[list[Tensor]], **kwargs) -> tuple[list, list[int]]:
    """`inspect` on as many threads as there are ranks, summing through a barrier: stats and calls by rank."""
    world = len(rank_grads)
    barrier = threading.Barrier(world, timeout=300)
    slots: list[Tensor] = [torch.empty(0)] * world
    calls = [0] * world

    def on_rank(rank: int):
        def all_reduce(vector: Tensor) -> None:
            slots[rank] = vector.clone()
            calls[rank] += 1
            barrier.wait()
            vector.copy_(torch.stack(slots).sum(dim=0))
            barrier.wait()

        try:
            return inspect(rank_grads[rank], all_reduce=all_reduce, **kwargs)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(on_rank, range(world))), calls


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# --- The norm --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_is_right_for_every_dtype_and_length(dtype: torch.dtype, numel: int) -> None:
    grad = random(numel, dtype)
    stats = inspect([grad])
    tolerance = 1e-14 if numel < 1024 or dtype == torch.float64 else 3e-7
    assert stats.norm.item() == pytest.approx(exact_norm(grad), rel=tolerance)
    assert (stats.norm.dtype, stats.norm.shape) == (torch.float64, ())
    assert (stats.found_inf.dtype, stats.found_inf.shape, stats.found_inf.item()) == (torch.float32, (), 0.0)
    assert stats.finite


def test_many_shards_of_mixed_dtypes_are_one_gradient() -> None:
    grads = [random(numel, dtype, seed=numel) for numel in (0, 5, 1024, 40_000) for dtype in DTYPES]
    assert inspect(grads).norm.item() == pytest.approx(exact_norm(*grads), rel=3e-7)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 3000), max_size=8), seed=st.integers(0, 99))
def test_the_cut_into_shards_does_not_change_the_norm(lengths: list[int], seed: int) -> None:
    whole = random(sum(lengths), seed=seed)
    norm = inspect(list(torch.split(whole, lengths))).norm.item() if lengths else 0.0
    assert norm == pytest.approx(exact_norm(whole), rel=3e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cuts_between_rows_leave_the_norm_alone_whatever_the_size(dtype: torch.dtype) -> None:
    whole = random(2**18 + 7 * 1024, dtype)
    one = inspect([whole]).norm.item()
    for num_ranks in (5, 37):
        cuts = torch.chunk(whole.view(-1, 1024), num_ranks)
        assert inspect([cut.reshape(-1) for cut in cuts]).norm.item() == pytest.approx(one, rel=1e-15)


def test_a_large_float32_norm_does_not_drift_as_a_float32_sum_does() -> None:
    grad = torch.full((2**24 + 77,), 0.1)
    truth = float(grad[0].double()) * math.sqrt(grad.numel())
    assert inspect([grad]).norm.item() == pytest.approx(truth, rel=3e-7)


def test_a_large_random_norm_is_exact_to_a_few_billionths() -> None:
    grad = random(2**22 + 13)
    assert inspect([grad]).norm.item() == pytest.approx(grad.double().square().sum().sqrt().item(), rel=1e-8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_number_of_torch_threads_does_not_change_a_bit(dtype: torch.dtype, threads) -> None:
    grads = [random(3 * 2**18 + 77, dtype), random(100_003, dtype), random(5, dtype)]
    norms = set()
    for count in (1, 2, 3, 7):
        threads(count)
        norms.add(inspect(grads).norm.item())
    assert len(norms) == 1


@pytest.mark.parametrize("seed", range(6))
def test_the_sum_of_very_many_rows_does_not_depend_on_the_threads_either(seed: int, threads) -> None:
    total = sys.modules["zprecision.inspect"]._total  # zprecision.inspect, the attribute, is the function
    rows = random(300_001, seed=seed).double().exp()  # as of a shard of 38 million elements
    sums = set()
    for count in (1, 2, 3, 7):
        threads(count)
        sums.add(total([rows], rows.device).item())
    assert len(sums) == 1
    assert sums.pop() == pytest.approx(math.fsum(rows.tolist()), rel=1e-14)


@pytest.mark.parametrize("grads", [[], [torch.empty(0)], [torch.empty(0), torch.empty(0, 3)]])
def test_no_elements_have_norm_zero(grads: list[Tensor]) -> None:
    stats = inspect(grads)
    assert (stats.norm.item(), stats.finite, stats.extra.tolist()) == (0.0, True, [])


def test_any_shape_and_layout_of_memory_counts_each_element_once() -> None:
    base = random(24_000).view(2, 3, 4000)
    grads = [
        base.transpose(0, 2),
        base[:, ::2, 1::3],
        torch.tensor(2.5),
        torch.tensor([1.5]).expand(7),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]
    assert inspect(grads).norm.item() == pytest.approx(exact_norm(*grads), rel=3e-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [100, 2**18 + 5])
def test_gradients_are_only_read(dtype: torch.dtype, numel: int) -> None:
    grad = random(numel, dtype)
    grad[3] = math.inf  # takes the second read too
    before = grad.clone()
    inspect([grad, grad[:50]])
    assert torch.equal(grad, before)


def test_nothing_is_recorded_for_autograd() -> None:
    grad = torch.ones(3, requires_grad=True)
    stats = inspect([grad], extra=torch.ones(1, requires_grad=True))
    assert not stats.norm.requires_grad
    assert not stats.extra.requires_grad


def test_tiny_gradients_whose_squares_vanish_in_float32_keep_their_norm() -> None:
    grad = torch.full((1000,), 1e-30)
    assert inspect([grad]).norm.item() == pytest.approx(exact_norm(grad), rel=1e-12)


# --- Finiteness ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("numel", "place"), [(1, 0), (1500, 1499), (2**18 + 9, 7), (2**18 + 9, 2**18 + 8)])
def test_one_bad_element_anywhere_is_found(bad: float, dtype: torch.dtype, numel: int, place: int) -> None:
    grad = random(numel, dtype)
    grad[place] = bad
    stats = inspect([random(10), grad.to(dtype), random(10)])
    assert stats.found_inf.item() == 1.0
    assert not stats.finite
    assert not math.isfinite(stats.norm.item())


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float32, 1e25),
        (torch.float32, torch.finfo(torch.float32).max),
        (torch.bfloat16, 1e38),
        (torch.float16, 65504.0),
        (torch.float64, 1e200),
        (torch.float64, torch.finfo(torch.float64).max / 2**12),
    ],
)
@pytest.mark.parametrize("numel", [1, 1025, 2**18 + 9])
def test_finite_gradients_whose_squares_overflow_are_finite(dtype: torch.dtype, value: float, numel: int) -> None:
    grad = torch.full((numel,), value, dtype=dtype)
    stats = inspect([grad])
    assert stats.found_inf.item() == 0.0
    assert stats.norm.item() == pytest.approx(grad[0].item() * math.sqrt(numel), rel=3e-7)


def test_the_second_read_is_exact_just_above_where_float32_squares_overflow(summed_by: str) -> None:
    grad = random(2**18).mul_(2e19)
    counted = Counted()
    assert inspect([grad], all_reduce=counted).norm.item() == pytest.approx(exact_norm(grad), rel=1e-12)
    assert len(counted.vectors) == (2 if summed_by == "torch" else 1)  # the kernel sums in float64


# --- Ranks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [0, 1, 1000, 2**18 + 3])
def test_an_ordinary_step_calls_all_reduce_exactly_once(numel: int) -> None:
    counted = Counted()
    inspect([random(numel), random(7)], all_reduce=counted, extra=torch.ones(4))
    assert [(tuple(vector.shape), vector.dtype) for vector in counted.vectors] == [((5,), torch.float64)]


def test_an_overflow_calls_it_once_more_and_extra_travels_once() -> None:
    counted = Counted()
    inspect([torch.tensor([math.nan])], all_reduce=counted, extra=torch.ones(4))
    assert [tuple(vector.shape) for vector in counted.vectors] == [(5,), (1,)]


def test_all_ranks_get_the_norm_of_the_union() -> None:
    grads = [[random(5000, seed=1)], [], [random(3, seed=2), random(2**18, seed=3)], [torch.empty(0)]]
    stats, calls = on_ranks(grads)
    truth = exact_norm(*(grad for rank in grads for grad in rank))
    assert calls == [1, 1, 1, 1]
    assert len({s.norm.item() for s in stats}) == 1
    assert stats[0].norm.item() == pytest.approx(truth, rel=1e-8)


@pytest.mark.parametrize("bad_rank", [0, 1, 2])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_one_bad_element_on_one_rank_stops_every_rank(bad_rank: int, bad: float) -> None:
    grads = [[random(100, seed=rank)] for rank in range(3)]
    grads[bad_rank][0][50] = bad
    stats, calls = on_ranks(grads)
    assert [s.found_inf.item() for s in stats] == [1.0, 1.0, 1.0]
    assert calls == [2, 2, 2]


def test_squares_that_overflow_on_one_rank_send_all_ranks_into_the_second_read(
    summed_by: str,
) -> None:
    huge, small = torch.full((2**18,), 1e25), torch.full((10,), 3.0)
    stats, calls = on_ranks([[huge], [small], []])
    assert calls == ([2, 2, 2] if summed_by == "torch" else [1, 1, 1])  # the kernel sums in float64
    assert all(s.finite for s in stats)
    assert stats[2].norm.item() == pytest.approx(huge[0].item() * 2**9, rel=1e-12)


def test_extra_scalars_are_summed_in_the_same_call() -> None:
    stats, calls = on_ranks([[random(4)], [random(4)]], extra=torch.tensor([1.5, 2**53 + 2.0]))
    assert calls == [1, 1]
    assert stats[1].extra.dtype == torch.float64
    assert stats[1].extra.tolist() == [3.0, 2.0 * (2.0**53)]  # float32 rounded it before it came here


@pytest.mark.parametrize("extra", [torch.tensor(3), torch.tensor([3], dtype=torch.int32), torch.tensor(3.0)])
def test_an_extra_of_any_real_dtype_and_of_no_dimension_is_taken(extra: Tensor) -> None:
    assert inspect([], extra=extra).extra.tolist() == [3.0]


@pytest.mark.parametrize("grads", [[], [random(5)]], ids=["no gradients", "gradients"])
def test_numbers_are_extras_too(grads: list[Tensor]) -> None:
    wide = 2.0**53 + 2.0
    stats, calls = on_ranks([grads, [random(4)]], extra=(1.5, wide, 0), beside=torch.tensor(7.0))
    assert [each.extra.tolist() for each in stats] == [[3.0, 2 * wide, 0.0]] * 2
    assert [each.numbers for each in stats] == [(each.norm.item(), 3.0, 2 * wide, 0.0, 7.0) for each in stats]
    assert (stats[0].extra.dtype, calls) == (torch.float64, [1, 1])


def test_a_non_finite_extra_does_not_affect_the_step() -> None:
    stats = inspect([torch.ones(2)], extra=torch.tensor([math.nan]))
    assert stats.finite
    assert math.isnan(stats.extra.item())


# --- Rejected input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "bad", "message"),
    [
        (TypeError, None, "gradient 1 is a NoneType; leave it out"),
        (TypeError, torch.ones(2, dtype=torch.int64), "gradient 1 is torch.int64; it must have a real floating"),
        (TypeError, torch.ones(2, dtype=torch.complex64), "gradient 1 is torch.complex64"),
        (TypeError, torch.eye(3).to_sparse(), r"gradient 1 is torch.sparse_coo; pass its coalesce\(\).values"),
        (ValueError, torch.ones(2, device="meta"), "gradient 1 is on meta, gradient 0 on cpu"),
    ],
)
def test_what_is_no_gradient_is_rejected_with_its_index(error: type, bad: object, message: str) -> None:
    with pytest.raises(error, match=message):
        inspect([torch.ones(1), bad])


def test_sharded_tensors_and_tensors_without_memory_are_not_read_by_the_kernel() -> None:
    class Sharded(Tensor):
        def to_local(self) -> Tensor:
            return self.as_subclass(Tensor)

    part = torch.full((4,), 3.0).as_subclass(Sharded)
    with pytest.raises(TypeError, match=r"gradient 0 is a Sharded; pass its to_local\(\)"):
        inspect([part])
    assert inspect([part.to_local()]).norm.item() == 6.0
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):  # not a crash of the process
        inspect([torch.ones(4)])


# --- The clip divisor ------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    max_norm=st.sampled_from([0.01, 0.5, 1.0, 3.0, 100.0]),
    scale=st.sampled_from([1.0, 8.0, 65536.0, 1000.25]),
    size=st.sampled_from([1e-6, 0.1, 1.0, 50.0]),
    seed=st.integers(0, 9),
)
def test_dividing_equals_unscaling_and_then_clip_grad_norm(
    max_norm: float, scale: float, size: float, seed: int
) -> None:
    gradients = [random(30, seed=seed) * size, random(7, seed=seed + 10) * size]
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient.clone()
    nn.utils.clip_grad_norm_(parameters, max_norm)

    scaled = [gradient * scale for gradient in gradients]
    divisor = clip_divisor(inspect(scaled).norm, torch.tensor(scale), max_norm)
    for parameter, gradient in zip(parameters, scaled):
        torch.testing.assert_close(gradient / divisor, parameter.grad, rtol=2e-6, atol=0)


def test_the_divisor_is_the_factor_when_nothing_is_clipped() -> None:
    norm, factor = torch.tensor(640.0, dtype=torch.float64), torch.tensor(64.0)
    divisors = {max_norm: clip_divisor(norm, factor, max_norm).item() for max_norm in (0, 11.0, math.inf)}
    assert divisors == {0: 64.0, 11.0: 64.0, math.inf: 64.0}


def test_the_divisor_follows_the_formula_to_the_last_bit_of_float32() -> None:
    divisor = clip_divisor(torch.tensor(640.0, dtype=torch.float64), torch.tensor(64.0), 2.5)
    assert (divisor.dtype, divisor.shape) == (torch.float32, ())
    assert divisor.item() == torch.tensor(64.0 * (10.0 + 1e-6) / 2.5).item()


def test_the_divisor_never_waits_for_the_host() -> None:
    norm, factor = torch.empty((), dtype=torch.float64, device="meta"), torch.empty((), device="meta")
    assert clip_divisor(norm, factor, 1.0).device.type == "meta"


@pytest.mark.parametrize("max_norm", [-1.0, math.nan, "1", True])
def test_an_impossible_max_norm_is_rejected(max_norm: object) -> None:
    with pytest.raises(ValueError, match=rf"max_norm={max_norm!r}.*>= 0; 0 disables clipping"):
        clip_divisor(torch.tensor(1.0, dtype=torch.float64), torch.tensor(1.0), max_norm)


# --- The first culprit -----------------------------------------------------------------------------------


def test_the_first_non_finite_tensor_is_named_with_its_kind() -> None:
    good, inf, nan = torch.ones(3), torch.tensor([1.0, -math.inf]), torch.tensor([math.nan, math.inf])
    assert first_nonfinite([("a", good), ("b", inf), ("c", nan)]) == NonFiniteGradient("b", "inf")
    assert first_nonfinite([("a", good), ("c", nan), ("b", inf)]) == NonFiniteGradient("c", "nan")


def test_finite_tensors_have_no_culprit() -> None:
    named = [("empty", torch.empty(0)), ("huge", torch.full((2,), 3e38)), ("ids", torch.arange(3))]
    assert first_nonfinite(named) is None
    assert first_nonfinite([]) is None


def test_the_search_stops_at_the_first_culprit() -> None:
    def named() -> Iterator[tuple[str, Tensor]]:
        yield "bad", torch.tensor(math.inf)
        raise AssertionError("looked further")

    assert first_nonfinite(named()) == NonFiniteGradient("bad", "inf")


def test_sparse_gradients_can_be_searched() -> None:
    sparse = torch.tensor([0.0, math.nan]).to_sparse()
    assert first_nonfinite([("embedding", sparse)]) == NonFiniteGradient("embedding", "nan")


@given(
    norm=st.floats(0, 1e30),
    factor=st.integers(-20, 24).map(lambda exponent: 2.0**exponent),
    max_norm=st.sampled_from([0.0, 1e-3, 0.3, 1.0, 50.0]),
)
@settings(max_examples=60, deadline=None)
def test_the_divisor_of_numbers_is_that_of_tensors_bit_for_bit(norm: float, factor: float, max_norm: float) -> None:
    on_device = clip_divisor(torch.tensor(norm, dtype=torch.float64), torch.tensor(factor), max_norm)
    assert torch.equal(torch.tensor(divisor_of(norm, factor, max_norm), dtype=torch.float32), on_device)


@pytest.mark.parametrize("values", [[3.0, 4.0], [1e30, 1.0], [math.inf, 1.0], [math.nan, 2.0]])
def test_the_numbers_on_the_host_are_those_of_the_tensors(values: list[float]) -> None:
    stats = inspect([torch.tensor(values)], extra=torch.tensor([7.0, 8.0]))
    norm, *extra = stats.numbers
    assert extra == [7.0, 8.0]
    assert torch.equal(torch.tensor(norm, dtype=torch.float64), stats.norm) or math.isnan(norm) == stats.norm.isnan()
    assert stats.finite == (not stats.found_inf) == math.isfinite(norm)
