"""LAMB beyond the contract table in conftest.py: the trust ratio, and tensors inside flat shards."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim
from zoptim import LAMB, Segment

OPTIONS: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}


def step_of(weight: Tensor, grad: Tensor, **options: Any) -> Tensor:
    """The change of the weight in one step."""
    param = weight.clone().requires_grad_()
    param.grad = grad
    LAMB([param], **{"lr": 0.1, "eps": 0.0, **options}).step()
    return weight - param.detach()


# The trust ratio --------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize(("size", "ratio"), [(2.0, 2.0), (0.5, 0.5), (100.0, 10.0), (1e-4, 0.01)])
def test_the_step_is_as_long_as_the_weight_allows_within_the_bounds(size: float, ratio: float, foreach: Any) -> None:
    """Without decay the first direction is the gradient's sign, so the ratio is the weight's size."""
    moved = step_of(torch.full((50,), size), torch.linspace(1, 3, 50), foreach=foreach)
    torch.testing.assert_close(moved, torch.full((50,), 0.1 * ratio), rtol=1e-3, atol=0)


@pytest.mark.parametrize("foreach", [None, True])
def test_the_bounds_can_be_set(foreach: Any) -> None:
    moved = step_of(torch.full((50,), 2.0), torch.ones(50), max_coeff=0.5, min_coeff=0.5, foreach=foreach)
    torch.testing.assert_close(moved, torch.full((50,), 0.05))


@pytest.mark.parametrize("foreach", [None, True])
def test_a_weight_or_a_direction_of_zero_has_ratio_one(foreach: Any) -> None:
    torch.testing.assert_close(step_of(torch.zeros(50), torch.ones(50), foreach=foreach), torch.full((50,), 0.1))
    still = step_of(torch.ones(50), torch.zeros(50), eps=1e-6, foreach=foreach)
    assert torch.equal(still, torch.zeros(50))


def test_each_tensor_has_a_ratio_of_its_own() -> None:
    params = [torch.full((30,), size).requires_grad_() for size in (0.5, 2.0)]
    for param in params:
        param.grad = torch.ones(30)
    LAMB(params, lr=0.1, eps=0.0).step()
    assert [round(param[0].item(), 5) for param in params] == [0.45, 1.8]


def test_a_step_does_not_depend_on_the_gradients_size() -> None:
    grad = torch.linspace(-1, 1, 40)
    small, large = (step_of(torch.ones(40), grad * size, eps=1e-12) for size in (1e-4, 1e4))
    torch.testing.assert_close(small, large, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("numel", [63, 64, 1025, 40_000])
def test_norms_are_those_of_float64_at_every_length(numel: int, lab: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, grad = torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)
    expected, _ = zoptim.lamb_rule(
        weight.double(), grad.double(), zoptim.AdamMoments.zeros(weight.double()), **OPTIONS
    )
    found = weight - step_of(weight, grad, **OPTIONS)
    lab.assert_near([found], [expected], rtol=1e-6, atol=1e-6)


def test_float16_parameters_have_float32_moments() -> None:
    param = torch.ones(40, dtype=torch.float16).requires_grad_()
    param.grad = torch.full((40,), 1e-4, dtype=torch.float16)
    optimizer = LAMB([param], lr=0.1)
    optimizer.step()
    assert optimizer.state[param]["exp_avg_sq"].dtype is torch.float32
    assert param.detach().float().sub(0.9).abs().max() < 1e-3, "a second moment of 0 would divide by eps"


# Flat shards ------------------------------------------------------------------------------------------

SHAPES = [(300,), (20, 30), (), (7,)]
ALIGNED = [0, 512, 1280, 1536]  # where tensors begin, with gaps between them, at multiples of 256
PACKED = [0, 300, 900, 901]


def flat_and_whole(
    lab: Any, starts: list[int], dtype: torch.dtype, **more: Any
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Tensors after four steps, in a flat shard and as whole tensors; and the shard."""
    whole = lab.make_params(SHAPES, dtype)
    shard = torch.full((starts[-1] + 7 + 5,), 7.0).to(dtype)
    segments = [Segment(start, shape, index) for index, (start, shape) in enumerate(zip(starts, SHAPES))]
    for segment, param in zip(segments, whole):
        shard[segment.row] = param.detach().flatten()
    shard.requires_grad_()
    flat, alone = LAMB([shard], **OPTIONS, **more), LAMB(whole, **OPTIONS, **more)
    flat.place_segments({shard: segments})
    for step in range(4):
        shard.grad = torch.zeros_like(shard)
        for segment, grad in zip(segments, lab.make_grads(step, SHAPES)):
            shard.grad[segment.row] = grad.flatten().to(dtype)
        flat.step()
    lab.run(alone, whole, range(4), SHAPES)
    found = [shard.detach()[segment.row].view(segment.shape) for segment in segments]
    return found, [param.detach() for param in whole], shard.detach()


@pytest.mark.parametrize(
    ("starts", "dtype", "more"),
    [
        (PACKED, torch.float32, {}),
        (ALIGNED, torch.float32, {}),
        (PACKED, torch.float32, {"state_dtype": "bf16"}),
        (ALIGNED, torch.float32, {"state_dtype": "8bit"}),
        (PACKED, torch.bfloat16, {"split_master": True}),
        (PACKED, torch.bfloat16, {}),
        (ALIGNED, torch.bfloat16, {"split_master": True, "state_dtype": "8bit"}),
        (PACKED, torch.float32, {"eps_inside_sqrt": True, "bias_correction": False, "maximize": True}),
        (PACKED, torch.float32, {"foreach": True}),
    ],
    ids=["packed", "with gaps", "bf16 states", "8bit", "split", "all bf16", "split 8bit", "options", "torch"],
)
def test_tensors_in_a_flat_shard_equal_tensors_alone_bit_for_bit(
    starts: list[int], dtype: torch.dtype, more: dict[str, Any], lab: Any
) -> None:
    found, expected, _ = flat_and_whole(lab, starts, dtype, **more)
    lab.assert_bitwise(found, expected)


def test_padding_between_tensors_is_unchanged(lab: Any) -> None:
    _, _, shard = flat_and_whole(lab, ALIGNED, torch.float32)
    assert torch.equal(shard[300:512], torch.full((212,), 7.0))
    assert torch.equal(shard[-5:], torch.full((5,), 7.0))


def test_one_count_for_all_tensors_of_a_shard_advances_once() -> None:
    shard = torch.ones(20).requires_grad_()
    optimizer = LAMB([shard])
    optimizer.place_segments({shard: [Segment(0, (12,)), Segment(12, (8,), 1)]})
    for _ in range(3):
        shard.grad = torch.ones(20)
        optimizer.step()
    assert optimizer.state[shard]["step"].item() == 3.0


def test_a_layout_survives_loading(lab: Any) -> None:
    shard = torch.cat([torch.full((10,), 0.5), torch.full((10,), 2.0)]).requires_grad_()
    optimizer = LAMB([shard], lr=0.1, eps=0.0)
    optimizer.place_segments({shard: [Segment(0, (10,)), Segment(10, (10,), 1)]})
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    shard.grad = torch.ones(20)
    optimizer.step()
    assert [round(value, 5) for value in shard.detach()[[0, 19]].tolist()] == [0.45, 1.8]


# Tensors that are cut ---------------------------------------------------------------------------------


class Meeting:
    """An all_reduce between threads, each of which is a rank; counts the calls."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=300)
        self.given: list[Tensor] = []
        self.num_calls = 0

    def all_reduce(self, tensor: Tensor) -> None:
        self.given.append(tensor.clone())
        self.barrier.wait()
        total = torch.stack(self.given).sum(dim=0)
        self.barrier.wait()
        tensor.copy_(total)
        if self.barrier.wait() == 0:
            self.num_calls += 1
            self.given.clear()
        self.barrier.wait()


def run_ranks(*ranks: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def guarded(rank: Callable[[], None]) -> None:
        try:
            rank()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def cut_and_whole(lab: Any, cuts: list[int], dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """Three steps of concatenated tensors in shards cut at `cuts`, and of the whole tensors."""
    whole = lab.make_params(SHAPES, dtype)
    flat = torch.cat([param.detach().flatten() for param in whole])
    bounds = list(zip(cuts, [*cuts[1:], flat.numel()]))
    shards = [flat[low:high].clone().requires_grad_() for low, high in bounds]
    meeting, optimizers = Meeting(len(bounds)), []
    for shard, (low, high) in zip(shards, bounds):
        segments = []
        for index, (start, param) in enumerate(zip(PACKED, whole)):
            first, last = max(start, low), min(start + param.numel(), high)
            if first < last:
                shape = tuple(param.shape) if last - first == param.numel() else (last - first,)
                segments.append(Segment(first - low, shape, index))
        optimizer = LAMB([shard], **OPTIONS, **more)
        optimizer.place_segments({shard: segments}, num_tensors=len(SHAPES), all_reduce=meeting.all_reduce)
        optimizers.append(optimizer)

    def rank(k: int) -> None:
        for step in range(3):
            grads = torch.cat([grad.flatten() for grad in lab.make_grads(step, SHAPES)]).to(dtype)
            shards[k].grad = grads[slice(*bounds[k])]
            optimizers[k].step()

    run_ranks(*[lambda k=k: rank(k) for k in range(len(bounds))])
    lab.run(LAMB(whole, **OPTIONS, **more), whole, range(3), SHAPES)
    return (
        torch.cat([s.detach() for s in shards]),
        torch.cat([p.detach().flatten() for p in whole]),
        meeting.num_calls,
    )


@pytest.mark.parametrize("cuts", [[0, 450], [0, 100, 905], [0, 300], [0, 908]], ids=str)
def test_cut_tensors_step_as_whole_ones(cuts: list[int], lab: Any) -> None:
    found, expected, calls = cut_and_whole(lab, cuts)
    lab.assert_near([found], [expected], rtol=1e-6, atol=1e-6)
    assert calls == 3, "one reduction a step"


def test_cut_tensors_without_kernels_step_as_whole_ones(lab: Any) -> None:
    found, expected, calls = cut_and_whole(lab, [0, 450, 905], foreach=True)
    lab.assert_near([found], [expected], rtol=1e-6, atol=1e-6)
    assert calls == 3
    found, expected, _ = cut_and_whole(lab, [0, 450], torch.bfloat16, foreach=True)
    lab.assert_near([found], [expected], rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(
    "dtype_and_more", [(torch.bfloat16, {"split_master": True}), (torch.float32, {"state_dtype": "bf16"})]
)
def test_cut_tensors_in_other_formats_step_as_whole_ones(dtype_and_more: Any, lab: Any) -> None:
    dtype, more = dtype_and_more
    found, expected, _ = cut_and_whole(lab, [0, 450], dtype, **more)
    lab.assert_near([found], [expected], rtol=2**-7, atol=1e-3)


def test_a_rank_without_tensors_joins_the_reduction(lab: Any) -> None:
    found, expected, calls = cut_and_whole(lab, [0, 450, 908])
    lab.assert_near([found], [expected], rtol=1e-6, atol=1e-6)
    assert calls == 3


def test_a_skipped_step_reduces_nothing_and_changes_nothing(lab: Any) -> None:
    shard = torch.ones(20).requires_grad_()
    optimizer = LAMB([shard])
    seen: list[Tensor] = []
    optimizer.place_segments({shard: [Segment(0, (20,))]}, num_tensors=1, all_reduce=seen.append)
    shard.grad, optimizer.found_inf = torch.full((20,), float("nan")), torch.tensor(1.0)
    optimizer.step()
    assert not seen
    assert torch.equal(shard.detach(), torch.ones(20))
    assert optimizer.state[shard]["step"].item() == 0.0
    optimizer.found_inf = torch.tensor(0.0)
    shard.grad = torch.ones(20)
    optimizer.step()
    assert [tuple(tensor.shape) for tensor in seen] == [(1, 2)]
    assert seen[0].dtype is torch.float64


def test_tensors_that_are_whole_keep_their_own_norms_beside_cut_ones(lab: Any) -> None:
    shard, alone = torch.full((16,), 2.0).requires_grad_(), torch.full((16,), 0.5).requires_grad_()
    optimizer = LAMB([shard, alone], lr=0.1, eps=0.0)
    optimizer.place_segments(
        {shard: [Segment(0, (16,))]}, num_tensors=1, all_reduce=lambda sums: sums.mul_(torch.tensor([4.0, 1.0]))
    )
    shard.grad, alone.grad = torch.ones(16), torch.ones(16)
    optimizer.step()
    assert shard[0].item() == pytest.approx(2.0 - 0.1 * 4.0), "the rest of the tensor is elsewhere"
    assert alone[0].item() == pytest.approx(0.5 - 0.1 * 0.5)


# Refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("segments", "more", "message"),
    [
        (
            [Segment(0, (8,)), Segment(4, (8,))],
            {},
            "begins before 8, the end of the previous segment; segments must be disjoint",
        ),
        ([Segment(16, (8,))], {}, "segments end at element 24; the shard has 20 elements"),
        ([Segment(0, (8,), 3)], {"num_tensors": 3}, "a segment has index 3; num_tensors=3 allows \\[0, 3\\)"),
        ([Segment(0, (8,), -1)], {"num_tensors": 3}, "a segment has index -1; num_tensors=3"),
    ],
)
def test_segments_that_do_not_fit_raise(segments: list[Segment], more: dict[str, Any], message: str) -> None:
    shard = torch.ones(20).requires_grad_()
    with pytest.raises(ValueError, match=message):
        LAMB([shard]).place_segments({shard: segments}, all_reduce=(lambda sums: None) if more else None, **more)


def test_segments_that_cut_a_block_of_8bit_states_raise_with_their_names() -> None:
    shard = torch.ones(600).requires_grad_()
    optimizer = LAMB([("flat", shard)], state_dtype="8bit")
    optimizer.place_segments({shard: [Segment(0, (300,)), Segment(300, (300,), 1)]})
    shard.grad = torch.ones(600)
    with pytest.raises(
        ValueError, match=r"parameter 0 of group 0 \('flat'\) has a segment that starts at 300 and 8-bit states"
    ):
        optimizer.step()
    assert torch.equal(shard.detach(), torch.ones(600))
