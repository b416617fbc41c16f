"""Jobs of the C kernels: overlap checks, and updates by address."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim
from zoptim.backends import native
from zoptim.backends.contract import Hyper, Streams
from zoptim.backends.cpu import CpuJob
from zoptim.backends.memory import WrittenRanges, addresses, byte_sizes
from zoptim.backends.signals import Signals

NO_SIGNALS = Signals()


@pytest.fixture(params=["library", "python"])
def searcher(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both implementations of the overlap search."""
    if request.param == "library":
        assert native.library() is not None
        yield
    else:
        with native.use_level("none"):
            yield


# Refusals through an optimizer ------------------------------------------------------------------------


def named(**params: Tensor) -> list[tuple[str, Tensor]]:
    for param in params.values():
        param.requires_grad_()
        param.grad = torch.ones_like(param)
    return list(params.items())


def test_parameters_that_share_memory_raise_with_their_names() -> None:
    base = torch.ones(10)
    optimizer = zoptim.AdamW(named(alone=torch.ones(3), first=base[:6], second=base[5:]))
    with pytest.raises(ValueError, match=r"memory of parameter 2 of group 0 \('second'\) or of its state overlaps"):
        optimizer.step()
    assert torch.equal(base.detach(), torch.ones(10))


def test_neighbours_in_one_tensor_are_no_overlap() -> None:
    base = torch.ones(10)
    optimizer = zoptim.AdamW(named(first=base[:5], second=base[5:]), lr=0.1)
    optimizer.step()
    assert base.detach().lt(1).all()


@pytest.mark.parametrize("which", ["first", "second"])
def test_a_gradient_in_a_weights_memory_raises_with_its_name(which: str) -> None:
    params = named(first=torch.ones(8), second=torch.ones(8))
    dict(params)[which].grad = params[0][1].detach()
    optimizer = zoptim.AdamW(params)
    with pytest.raises(
        ValueError, match=rf"gradient of parameter . of group 0 \('{which}'\) overlaps a weight or a state that the"
    ):
        optimizer.step()
    assert torch.equal(params[0][1].detach(), torch.ones(8))


def test_a_gradient_that_moves_into_a_weight_later_raises() -> None:
    (_, first), (_, second) = params = named(first=torch.ones(8), second=torch.ones(8))
    optimizer = zoptim.AdamW(params)
    optimizer.step()
    before = first.detach().clone()
    second.grad = first.detach()
    with pytest.raises(ValueError, match=r"gradient of parameter 1 of group 0 \('second'\) overlaps"):
        optimizer.step()
    assert torch.equal(first.detach(), before)
    second.grad = torch.ones(8)
    optimizer.step()


def test_a_gradient_in_the_memory_of_state_raises() -> None:
    ((_, param),) = params = named(only=torch.ones(8))
    optimizer = zoptim.AdamW(params)
    optimizer.step()
    param.grad = optimizer.state[param]["exp_avg"]
    with pytest.raises(ValueError, match=r"gradient of parameter 0 of group 0 \('only'\) overlaps"):
        optimizer.step()


@pytest.mark.parametrize("key", ["exp_avg", "step"])
def test_state_that_two_parameters_share_raises(key: str) -> None:
    (_, first), (_, middle), (_, second) = params = named(a=torch.ones(8), b=torch.ones(8), c=torch.ones(8))
    optimizer = zoptim.AdamW(params)
    optimizer.step()
    optimizer.state[second][key] = optimizer.state[first][key]
    before = [param.detach().clone() for param in (first, middle, second)]
    with pytest.raises(ValueError, match=r"memory of parameter 2 of group 0 \('c'\) or of its state overlaps"):
        optimizer.step()
    assert all(torch.equal(param.detach(), old) for param, old in zip((first, middle, second), before))


def test_state_in_the_memory_of_its_weight_raises() -> None:
    ((_, param),) = params = named(only=torch.ones(8))
    optimizer = zoptim.SGD(params, momentum=0.9)
    optimizer.step()
    optimizer.state[param]["momentum_buffer"] = param.detach()
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 \('only'\) or of its state overlaps"):
        optimizer.step()


def test_low_precision_weights_that_two_masters_share_raise() -> None:
    params = named(a=torch.ones(8), b=torch.ones(8))
    optimizer = zoptim.AdamW(params)
    weight = torch.ones(8, dtype=torch.bfloat16)
    for _, master in params:
        optimizer.mirror(master, weight)
    with pytest.raises(ValueError, match=r"parameter 1 of group 0 \('b'\) or of its state overlaps"):
        optimizer.step()


def test_two_gradients_may_share_memory() -> None:
    params = named(a=torch.ones(8), b=torch.ones(8))
    params[1][1].grad = params[0][1].grad
    zoptim.AdamW(params, lr=0.1).step()
    assert torch.equal(params[0][1].detach(), params[1][1].detach())


# WrittenRanges ----------------------------------------------------------------------------------------


def test_ranges_are_sorted_and_skip_empty_tensors() -> None:
    base = torch.zeros(100)
    ranges = WrittenRanges.make([[base[50:60], base[0:10]], [base[20:20], base[10:12]]])
    assert isinstance(ranges, WrittenRanges)
    start = base.data_ptr()
    assert [(a - start) // 4 for a in ranges.starts] == [0, 10, 50]
    assert [(b - start) // 4 for b in ranges.ends] == [10, 12, 60]


def test_rows_of_one_tensor_share_their_step() -> None:
    step, other = torch.zeros(()), torch.zeros(())
    assert isinstance(WrittenRanges.make([], [step, step, other]), WrittenRanges)
    assert WrittenRanges.make([], [step, other, step]) == (0, 2)
    assert WrittenRanges.make([[torch.ones(3)], [step, step]]) == (1, 1), "nothing else may be shared"


def test_an_overlap_of_written_tensors_is_returned_as_list_and_position() -> None:
    base, other = torch.zeros(100), torch.zeros(50)
    assert WrittenRanges.make([[base[:10], base[9:20]]]) == (0, 1)
    assert WrittenRanges.make([[other, base[:10]], [other[:0], base[5:6]]]) == (1, 1)


def test_adjacent_ranges_do_not_overlap(searcher: None) -> None:
    base = torch.zeros(100)
    ranges = WrittenRanges.make([[base[10:20], base[30:40]]])
    assert isinstance(ranges, WrittenRanges)
    for low, high, found in [(0, 10, None), (20, 30, None), (40, 100, None), (0, 11, 0), (19, 20, 0), (39, 50, 0),
                             (0, 100, 0), (12, 13, 0), (25, 25, None), (15, 15, None)]:  # fmt: skip
        read = [base[low:high]]
        assert ranges.find(array("Q", addresses(read)), byte_sizes(read)) == found, (low, high)


def test_the_first_of_several_overlaps_is_found(searcher: None) -> None:
    base = torch.zeros(100)
    ranges = WrittenRanges.make([[base[10:20], base[30:40]]])
    read = [base[:5], base[35:36], base[12:13]]
    assert isinstance(ranges, WrittenRanges)
    assert ranges.find(array("Q", addresses(read)), byte_sizes(read)) == 1
    nothing = WrittenRanges.make([[]])
    assert isinstance(nothing, WrittenRanges)
    assert nothing.find(array("Q", addresses(read)), byte_sizes(read)) is None


def test_random_ranges_are_judged_as_by_comparing_every_pair(searcher: None) -> None:
    rng = random.Random(0)
    for _ in range(200):
        edges = sorted(rng.sample(range(200), 2 * rng.randrange(1, 8)))
        written = [(a, b) for a, b in zip(edges[::2], edges[1::2])]
        read = [(a, a + rng.randrange(0, 12)) for a in (rng.randrange(200) for _ in range(5))]
        ranges = WrittenRanges(array("Q", [a for a, _ in written]), array("Q", [b for _, b in written]))
        expected = next(
            (k for k, (a, b) in enumerate(read) if b > a and any(a < d and c < b for c, d in written)), None
        )
        assert ranges.find(array("Q", [a for a, _ in read]), array("q", [b - a for a, b in read])) == expected


# CpuJob -----------------------------------------------------------------------------------------------


def sgd_streams(numels: tuple[int, ...] = (5, 300)) -> Streams:
    return Streams(weights=[torch.ones(n) for n in numels], grads=[torch.full((n,), 2.0) for n in numels])


def test_a_job_updates_all_of_its_rows_in_one_call() -> None:
    streams = sgd_streams((5, 0, 300, 1))
    CpuJob("sgd", 0, streams).step(Hyper(lr=0.25), NO_SIGNALS)
    assert all(torch.equal(weight, torch.full_like(weight, 0.5)) for weight in streams.weights)


def test_a_job_that_is_pointed_elsewhere_reads_and_writes_there_alone() -> None:
    old, new = sgd_streams(), sgd_streams()
    job = CpuJob("sgd", 0, old)
    job.bind(new)
    job.step(Hyper(lr=0.25), NO_SIGNALS)
    assert [weight[0].item() for weight in (*old.weights, *new.weights)] == [1.0, 1.0, 0.5, 0.5]


def test_rows_that_share_a_step_advance_it_once_and_found_inf_not_at_all() -> None:
    step, other = torch.tensor(3.0), torch.tensor(8.0)
    shard, moments = torch.ones(9), [torch.zeros(9), torch.zeros(9)]
    rows = [slice(0, 4), slice(4, 6), slice(6, 9)]
    streams = Streams(
        weights=[shard[row] for row in rows],
        grads=[torch.ones(9)[row] for row in rows],
        states=tuple([moment[row] for row in rows] for moment in moments),
        steps=[step, step, other],
    )
    job = CpuJob("adam", 0, streams)
    hyper = Hyper(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8)
    job.step(hyper, Signals(found_inf=torch.tensor(1.0)))
    assert (step.item(), other.item(), moments[0].any().item()) == (3.0, 8.0, False)
    job.step(hyper, Signals(found_inf=torch.tensor(0.0)))
    assert (step.item(), other.item()) == (4.0, 9.0)


def test_a_tensor_lr_and_a_scale_are_read_at_every_step() -> None:
    streams, lr, scale = sgd_streams((4,)), torch.tensor(0.25), torch.tensor(2.0)
    job = CpuJob("sgd", 0, streams)
    for expected in (0.75, 0.625):
        job.step(Hyper(lr=lr), Signals(grad_scale=scale))
        assert streams.weights[0][0].item() == expected
        scale.mul_(2)


def test_the_halves_of_lamb_are_the_whole() -> None:
    def streams() -> Streams:
        generator = torch.Generator().manual_seed(0)
        rows = [40_000, 7, 0]
        return Streams(
            weights=[torch.randn(n, generator=generator) for n in rows],
            grads=[torch.randn(n, generator=generator) for n in rows],
            states=([torch.zeros(n) for n in rows], [torch.zeros(n) for n in rows]),
            steps=[torch.zeros(()) for _ in rows],
        )

    hyper = Hyper(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, min_ratio=0.01, max_ratio=10.0)
    whole, halves = streams(), streams()
    CpuJob("lamb", 0, whole).step(hyper, NO_SIGNALS)
    job = CpuJob("lamb", 0, halves)
    squares = [weight.double().square().sum().item() for weight in halves.weights]
    sums = job.sums(hyper, NO_SIGNALS)
    assert sums is not None
    assert (sums.shape, sums.dtype) == ((3, 2), torch.float64)
    assert sums[:, 0].tolist() == pytest.approx(squares, rel=1e-6)
    job.apply()
    for a, b in zip(
        (*whole.weights, *whole.states[1], *whole.steps), (*halves.weights, *halves.states[1], *halves.steps)
    ):
        assert torch.equal(a, b)
    assert job.sums(hyper, Signals(found_inf=torch.tensor(1.0))) is None
    assert halves.steps[0].item() == 1.0


def test_a_step_writes_everything_but_the_gradients() -> None:
    one: list[list[Any]] = [[torch.ones(1)] for _ in range(7)]
    streams = Streams(
        weights=one[0],
        grads=one[1],
        states=(one[2],),
        scales=(one[3],),
        remainders=one[4],
        copies=one[5],
        steps=one[6],
    )
    everything = [*streams.written(), streams.steps]
    assert [id(tensors) for tensors in everything] == [id(tensors) for k, tensors in enumerate(one) if k != 1]
    assert len(sgd_streams().written()) == 1
