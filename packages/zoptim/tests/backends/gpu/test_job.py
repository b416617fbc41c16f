"""GpuJob from end to end on CPU tensors: tables, arguments, launches, errors."""

from __future__ import annotations

from array import array
from typing import Any

import attrs
import pytest
import torch

from zoptim.backends.contract import Flag, Hyper, Streams
from zoptim.backends.gpu import GpuJob
from zoptim.backends.memory import addresses
from zoptim.backends.signals import Signals

ADAM = Hyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)


def sgd(weights: list[torch.Tensor], grads: list[torch.Tensor], launcher: Any) -> GpuJob:
    return GpuJob("sgd", 0, Streams(weights=weights, grads=grads), launcher=launcher)


def test_a_step_over_300_tensors_is_two_launches(shim: Any) -> None:
    weights, grads = ([torch.ones(3) for _ in range(300)] for _ in range(2))
    job = sgd(weights, grads, shim)
    job.step(Hyper(lr=0.5), Signals())
    assert shim.names() == ["zk_prepare_rows", "zk_update"]
    assert all(weight.eq(0.5).all() for weight in weights)


def test_lamb_is_four_launches(shim: Any, make_case: Any) -> None:
    case = make_case("lamb: f32 f32 f32", numels=(5, 7))
    GpuJob(case.rule, case.flags, case.streams(), launcher=shim).step(ADAM, Signals())
    assert shim.names() == ["zk_prepare_rows", "zk_lamb_sums", "zk_lamb_rows", "zk_lamb_apply"]


def test_addresses_that_stay_cost_no_launch_and_those_that_move_one_for_480(shim: Any) -> None:
    weights, grads = ([torch.ones(2) for _ in range(1000)] for _ in range(2))
    job = sgd(weights, grads, shim)
    job.bind(Streams(weights=weights, grads=grads))
    assert shim.names() == []
    moved = [torch.full((2,), float(k)) for k in range(1000)]
    job.bind(Streams(weights=weights, grads=moved))
    assert shim.names() == ["zk_patch"] * 3
    job.step(Hyper(lr=1.0), Signals())
    assert [float(weight[1]) for weight in weights] == [1.0 - k for k in range(1000)]


def test_gradients_move_by_address_alone(shim: Any) -> None:
    weights, grads = ([torch.ones(2) for _ in range(600)] for _ in range(2))
    job = sgd(weights, grads, shim)
    moved = [torch.full((2,), float(k)) for k in range(600)]
    job.bind_grads(array("Q", addresses(grads)))
    assert shim.names() == []
    job.bind_grads(array("Q", addresses(moved)))
    assert shim.names() == ["zk_patch"] * 2
    job.step(Hyper(lr=1.0), Signals())
    assert [float(weight[1]) for weight in weights] == [1.0 - k for k in range(600)]


def test_all_streams_may_move(shim: Any, make_case: Any, assert_same_bits: Any) -> None:
    case = make_case("adam amsgrad: split bf16 q8 f16", numels=(300, 20))
    job = GpuJob(case.rule, case.flags, case.streams(), launcher=shim)
    moved, expected = case.streams(seed=5), case.streams(seed=5)
    job.bind(moved)
    job.step(ADAM, Signals())
    GpuJob(case.rule, case.flags, expected, launcher=shim).step(ADAM, Signals())
    assert_same_bits(moved, expected)


def test_gradients_are_divided_by_grad_scale_and_left_alone(shim: Any) -> None:
    weight, grad = torch.zeros(5), torch.full((5,), 8.0)
    sgd([weight], [grad], shim).step(Hyper(lr=1.0), Signals(torch.tensor(4.0)))
    assert weight.tolist() == [-2.0] * 5
    assert grad.tolist() == [8.0] * 5


@pytest.mark.parametrize(
    "name", ["adam: f32 f32 f32", "adam: bf16 bf16 q8 bf16", "sgd: f32 f32 -", "lion: split f32 bf16"]
)
def test_found_inf_leaves_every_byte_and_every_count(
    name: str, shim: Any, make_case: Any, assert_same_bits: Any
) -> None:
    case = make_case(name)
    streams = case.streams()
    GpuJob(case.rule, case.flags, streams, launcher=shim).step(ADAM, Signals(torch.tensor(2.0), torch.ones(())))
    assert_same_bits(streams, case.streams())


def test_a_clean_found_inf_stops_nothing_and_counts_advance_once_a_tensor(shim: Any, make_case: Any) -> None:
    case = make_case("adam: f32 f32 f32", numels=(10, 20, 30, 40))
    streams = case.streams()
    assert [float(step) for step in streams.steps] == [3.0, 3.0, 4.0, 5.0]
    GpuJob(case.rule, case.flags, streams, launcher=shim).step(ADAM, Signals(None, torch.zeros(())))
    assert [float(step) for step in streams.steps] == [4.0, 4.0, 5.0, 6.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_learning_rate_may_lie_on_the_device(dtype: torch.dtype, shim: Any) -> None:
    weight, grad, lr = torch.zeros(3), torch.ones(3), torch.tensor(0.5, dtype=dtype)
    job = sgd([weight], [grad], shim)
    job.step(Hyper(lr=lr), Signals())
    lr.fill_(0.25)
    job.step(Hyper(lr=lr), Signals())
    assert weight.tolist() == [-0.75] * 3


@pytest.mark.parametrize("flags", [0, Flag.NO_CORRECTION])
def test_the_number_of_the_update_decides_the_bias_correction(flags: int, shim: Any) -> None:
    weight, grad = torch.zeros(1), torch.full((1,), 2.0)
    states = ([torch.full((1,), 0.5)], [torch.full((1,), 0.25)])
    streams = Streams(weights=[weight], grads=[grad], states=states, steps=[torch.tensor(6.0)])
    GpuJob("adam", flags, streams, launcher=shim).step(Hyper(lr=1.0, beta1=0.5, beta2=0.75), Signals())
    mean, square = 0.5 * 0.5 + 0.5 * 2.0, 0.75 * 0.25 + 0.25 * 4.0
    corrections = (1.0, 1.0) if flags else (1 - 0.5**7, 1 - 0.75**7)
    assert weight.item() == pytest.approx(-(mean / corrections[0]) / (square / corrections[1]) ** 0.5, rel=1e-6)


def test_empty_rows_are_no_work(shim: Any) -> None:
    weights, grads = [torch.empty(0), torch.ones(1), torch.empty(0)], [torch.empty(0), torch.ones(1), torch.empty(0)]
    sgd(weights, grads, shim).step(Hyper(lr=1.0), Signals())
    assert weights[1].item() == 0.0
    shim.names()
    sgd([torch.empty(0)], [torch.empty(0)], shim).step(Hyper(lr=1.0), Signals())
    assert shim.names() == ["zk_prepare_rows"]


def test_rows_without_a_count_are_at_their_first_update(shim: Any) -> None:
    weight = torch.zeros(2)
    streams = Streams(weights=[weight], grads=[torch.ones(2)], states=([torch.zeros(2)], [torch.zeros(2)]))
    GpuJob("adam", 0, streams, launcher=shim).step(Hyper(lr=1.0, beta1=0.9, beta2=0.99, eps=0.0), Signals())
    assert weight.tolist() == [-1.0, -1.0]


def test_many_rows_with_different_counts_have_their_own_coefficients(shim: Any) -> None:
    counts = [float(k % 7) for k in range(600)]
    weights, states = (
        [torch.zeros(1) for _ in counts],
        ([torch.zeros(1) for _ in counts], [torch.zeros(1) for _ in counts]),
    )
    steps = [torch.tensor(count) for count in counts]
    streams = Streams(weights=weights, grads=[torch.ones(1) for _ in counts], states=states, steps=steps)
    GpuJob("adam", 0, streams, launcher=shim).step(Hyper(lr=1.0, beta1=0.9, beta2=0.99), Signals())
    for count, weight, step in zip(counts, weights, steps):
        n = count + 1
        expected = -(0.1 / (1 - 0.9**n)) / (0.01 / (1 - 0.99**n)) ** 0.5
        assert weight.item() == pytest.approx(expected, rel=1e-6)
        assert step.item() == n


def test_streams_of_two_devices_raise_with_their_names(shim: Any) -> None:
    streams = Streams(weights=[torch.ones(2)], grads=[torch.ones(2, device="meta")])
    with pytest.raises(ValueError, match="tensor 0 of the update has a stream on meta and weights on cpu"):
        GpuJob("sgd", 0, streams, launcher=shim)
    job = sgd([torch.ones(2)], [torch.ones(2)], shim)
    with pytest.raises(ValueError, match="found_inf is on meta, the weights are on cpu"):
        job.step(Hyper(lr=1.0), Signals(None, torch.ones((), device="meta")))


def test_threads_that_wait_for_others_are_noticed(shim: Any) -> None:
    """The shim itself: a barrier that not all threads reach is undefined on a GPU and an error here."""

    @attrs.frozen
    class Broken:
        kernels = ("broken",)

        def text(self) -> str:
            return "ZK_KERNEL(4, broken, int) { if (threadIdx.x < a) __syncthreads(); }"

    kernels = shim.load(Broken())
    assert kernels["broken"](1, (256).to_bytes(4, "little")) == 0
    assert kernels["broken"](1, (100).to_bytes(4, "little")) == 1
