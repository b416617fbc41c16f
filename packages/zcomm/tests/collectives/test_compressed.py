"""The compressed all-reduce, against golden values of DeepSpeed and a simulation of its law in one process."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

import zcomm
from zcomm import CompressedAllReduce, SignLayout
from zcomm.testing import end_ranks, recorded, run_ranks

# Two ranks, 16 elements, three calls with the same values: DeepSpeed 0.16.9.
INPUTS = (
    [1, -2, 3, -4, 0.5, -0.5, 0.25, -0.25, 8, 7, 6, 5, 4, 3, 2, 1],
    [-1, 1, 1, 1, -1, 2, -3, 4, -8, 1, 1, 0, 0, -1, -1, 2],
)
GOLDEN = (
    ((1.27519, "+-+-+-+-"), (2.56014, "++++++++")),
    ((3.92868, "--+--+-+"), (1.68520, "-++++++-")),
    ((3.05785, "++--+--+"), (4.64206, "+++++--+")),
)
GOLDEN_ERROR = (-1.57202895, -2.91329211, 5.91329211, 3.1259974)  # of rank 0's worker, after call 3


def _golden() -> list[Tensor]:
    rank = zcomm.group_rank()
    reduce = CompressedAllReduce(SignLayout.by_tensor([16], 2))
    found = []
    for _ in range(3):
        values = torch.tensor(INPUTS[rank], dtype=torch.float32)
        reduce.mean([values])
        found.append(values)
    return [*found, reduce.worker_error]


def test_three_calls_are_those_of_deepspeed() -> None:
    everyone = run_ranks(_golden, 2)
    for *found, _ in everyone:
        for values, halves in zip(found, GOLDEN):
            expected = [scale * (1 if sign == "+" else -1) for scale, signs in halves for sign in signs]
            assert torch.allclose(values, torch.tensor(expected), rtol=0, atol=5.1e-6)  # five decimals are known
    assert torch.allclose(everyone[0][-1][:4], torch.tensor(GOLDEN_ERROR), rtol=0, atol=1e-6)


class Simulated:
    """The published law on all ranks at once, in float64; tensors are cut into equal chunks of `span` elements."""

    def __init__(self, layout: SignLayout) -> None:
        self.layout = layout
        self.workers = [[torch.zeros(b.numel).double() for b in layout.buffers] for _ in range(layout.size)]
        self.servers = [torch.zeros(b.numel).double() for b in layout.buffers]

    def mean(self, values: list[list[Tensor]]) -> list[Tensor]:
        """values: [rank][buffer]; padding is ignored."""
        means = []
        for index, buffer in enumerate(self.layout.buffers):
            sums, out = torch.zeros(buffer.numel).double(), torch.zeros(buffer.numel).double()
            for rank in range(self.layout.size):
                both = values[rank][index].double() + self.workers[rank][index]
                for lo, hi in buffer.parts:
                    sent = _coded(both[lo:hi])
                    sums[lo:hi] += sent / self.layout.size
                    self.workers[rank][index][lo:hi] = both[lo:hi] - sent
            both, span = sums + self.servers[index], buffer.numel // self.layout.size
            for lo, hi in buffer.parts:
                for owner in range(self.layout.size):
                    begin, end = max(lo, owner * span), min(hi, (owner + 1) * span)
                    if begin < end:
                        out[begin:end] = _coded(both[begin:end])
                        self.servers[index][begin:end] = both[begin:end] - out[begin:end]
            means.append(out)
        return means


def _coded(values: Tensor) -> Tensor:
    scale = values.norm() / max(1, len(values)) ** 0.5
    return torch.where(values >= 0, scale, -scale)


BUFFERS = [(3072, [(0, 5), (8, 1000), (1000, 1000), (1008, 2000), (2000, 3070)]), (96, [(0, 3), (16, 96)]), (96, [])]


def _layouts(size: int) -> list[SignLayout]:
    return [
        SignLayout.of_buffers(BUFFERS, size),
        SignLayout.packed([5, 0, 17, 3000], size),
        SignLayout.by_tensor([5, 17, 3000], size),
        SignLayout.by_tensor([5, 17], size, padded=True),
    ]


def _values(layout: SignLayout, rank: int, call: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + call)
    buffers = []
    for index, buffer in enumerate(layout.buffers):
        flat = torch.zeros(buffer.numel)
        for tensor, begin, numel in layout.tensors:
            if tensor == index:
                flat[begin : begin + numel] = torch.randn(numel, generator=generator) * 10 ** (index - 1)
        buffers.append(flat)
    return buffers


def _follows_the_law(transport: str) -> None:
    size, rank = zcomm.group_size(), zcomm.group_rank()
    if transport == "gloo":
        os.environ["ZCOMM_TRANSPORT"] = "gloo"
    group = torch.distributed.new_group(list(range(size)))
    for layout in _layouts(size):
        reduce, law = CompressedAllReduce(layout, group), Simulated(layout)
        for call in range(4):
            everyone = [_values(layout, each, call) for each in range(size)]
            expected, buffers = law.mean(everyone), everyone[rank]
            reduce.mean_buffers(buffers)
            again = [torch.full_like(buffer, 7.0) for buffer in buffers]
            reduce.decode_latest(again)
            for found, wanted, same in zip(buffers, expected, again):
                assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-6)
                assert torch.equal(found, same)
    assert zcomm.transport(group) == ("gloo" if transport == "gloo" else "shared memory")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_tensors_in_buffers_follow_the_law(world_size: int) -> None:
    run_ranks(_follows_the_law, world_size, "shared")


def test_over_gloo_too() -> None:
    run_ranks(_follows_the_law, 2, "gloo")
    end_ranks()  # the variable stays in their environment


def _averages() -> list[float]:
    reduce, total = CompressedAllReduce(SignLayout.packed([16], 2)), torch.zeros(16)
    for _ in range(1000):
        values = torch.tensor(INPUTS[zcomm.group_rank()], dtype=torch.float32)
        reduce.mean([values])
        total.add_(values)
    return (total / 1000).tolist()


def test_error_feedback_makes_the_mean_over_calls_right() -> None:
    first, second = run_ranks(_averages, 2)
    assert first == second, "all ranks decode the same bits"
    assert max(abs(found - (a + b) / 2) for found, a, b in zip(first, *INPUTS)) <= 0.008


def _bytes_and_messages() -> tuple[float, list[str], int]:
    size, numels = zcomm.group_size(), [1 << 16] * 20
    tensors = [torch.randn(n) for n in numels]
    reduce = CompressedAllReduce(SignLayout.packed(numels, size))
    with recorded() as plain:
        for tensor in tensors:
            zcomm.all_reduce(tensor)
    with recorded() as log:
        reduce.mean(tensors)
    share = (size - 1) / size
    dense = 2 * share * plain.nbytes("all_reduce")
    sent = share * (log.nbytes("all_to_all") + log.nbytes("all_gather"))
    return dense / sent, log.ops, reduce.message_bytes


def test_one_message_a_phase_for_all_tensors_with_32_times_fewer_bytes() -> None:
    for ratio, ops, _ in run_ranks(_bytes_and_messages, 2):
        assert ops == ["all_to_all", "all_gather"]
        assert 31.9 < ratio <= 32.0  # the rest is scales


def test_padding_does_not_halve_the_scale() -> None:
    def scale(layout: SignLayout) -> float:
        return run_ranks(_scale_of_ones, 2, layout)[0]

    assert scale(SignLayout.by_tensor([4], 2)) == pytest.approx(1.0)
    assert scale(SignLayout.by_tensor([4], 2, padded=True)) < 0.8


def _scale_of_ones(layout: SignLayout) -> float:
    values = torch.ones(4)
    CompressedAllReduce(layout).mean([values])
    return float(values[0])


def test_one_rank_keeps_its_values_and_has_no_error() -> None:
    reduce = CompressedAllReduce(SignLayout.packed([3], 1))
    values = torch.tensor([1.0, -2.0, 3.0])
    with recorded() as log:
        reduce.mean([values])
    assert values.tolist() == [1.0, -2.0, 3.0]
    assert (log.count(), reduce.worker_error.numel(), reduce.server_error.numel()) == (0, 0, 0)


def _fused() -> list[Tensor]:
    size, rank, numels = zcomm.group_size(), zcomm.group_rank(), [5, 0, 300, 17]
    reduce = CompressedAllReduce(SignLayout.packed(numels, size, fused=True))
    flat = torch.randn(sum(numels), generator=torch.Generator().manual_seed(rank)).mul_(3)
    tensors = [part.clone() for part in flat.split(numels)]
    reduce.mean(tensors)
    return [flat, torch.cat(tensors), reduce.worker_error.norm(), reduce.server_error.norm()]


def test_fused_tensors_share_one_scale_of_a_worker_and_one_of_a_server() -> None:
    first, second = run_ranks(_fused, 2)
    assert torch.equal(first[1], second[1])
    assert len(set(first[1].abs().tolist())) == 2, "one scale for each of two servers"
    workers = [
        torch.where(each[0] >= 0, 1.0, -1.0) * each[0].norm() / len(each[0]) ** 0.5 for each in (first, second)
    ]
    mean = (workers[0] + workers[1]) / 2
    assert torch.equal(first[1] >= 0, mean >= 0)
    error = sum(float((each[0] - sent).square().sum()) for each, sent in zip((first, second), workers))
    assert float(first[2]) ** 2 + float(second[2]) ** 2 == pytest.approx(error, rel=1e-5)
    assert float(first[3]) ** 2 + float(second[3]) ** 2 == pytest.approx(
        float((mean - first[1]).square().sum()), rel=1e-4
    )


def _resets() -> None:
    reduce, layout = CompressedAllReduce(SignLayout.packed([8], 2)), SignLayout.packed([8], 2)
    first, second = torch.arange(8.0), torch.arange(8.0)
    reduce.mean([first])
    reduce.reset()
    with pytest.raises(ValueError, match="there is no result yet"):
        reduce.decode_latest([torch.zeros(16)])
    reduce.mean([second])
    assert torch.equal(first, second)
    other = CompressedAllReduce(layout)
    other.worker_error.copy_(reduce.worker_error)
    other.server_error.copy_(reduce.server_error)
    for each in (reduce, other):
        each.mean([first.copy_(torch.arange(8.0)) if each is reduce else second.copy_(torch.arange(8.0))])
    assert torch.equal(first, second), "errors are the whole state"


def test_errors_are_the_whole_state() -> None:
    run_ranks(_resets, 2)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="the layout is for 2 ranks, the group has 1"):
        CompressedAllReduce(SignLayout.packed([8], 2))
    with pytest.raises(ValueError, match="over 2 ranks its length must be a multiple of 16"):
        SignLayout.of_buffers([(24, [(0, 3)])], 2)
    with pytest.raises(ValueError, match="tensors must begin at multiples of 8"):
        SignLayout.of_buffers([(32, [(4, 8)])], 2)
    reduce = CompressedAllReduce(SignLayout.packed([8], 1))
    with pytest.raises(ValueError, match=r"got tensors of \[7\] elements; the layout has \[8\]"):
        reduce.mean([torch.zeros(7)])
    with pytest.raises(ValueError, match=r"got buffers of shapes \[\(7,\)\]; the layout has \[\(8,\)\]"):
        reduce.mean_buffers([torch.zeros(7)])
