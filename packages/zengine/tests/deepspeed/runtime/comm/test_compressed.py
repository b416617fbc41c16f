"""The compressed mean of one tensor, with the caller's errors, against DeepSpeed's golden values and its own law."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import zcomm
from zcomm.testing import run_ranks
from zengine.deepspeed.runtime.comm.compressed import CompressedBackend
from zengine.deepspeed.runtime.comm.hccl import HcclBackend
from zengine.deepspeed.runtime.comm.mpi import MpiBackend
from zengine.deepspeed.runtime.comm.nccl import NcclBackend

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


def _golden() -> tuple[list[Tensor], Tensor]:
    backend, rank = NcclBackend(), zcomm.group_rank()
    worker_error, server_error = torch.zeros(16), torch.zeros(8)
    found = []
    for _ in range(3):
        values = torch.tensor(INPUTS[rank], dtype=torch.float32).view(4, 4)
        result = backend.compressed_allreduce(values, worker_error, server_error, rank)
        assert result is values
        found.append(result.flatten())
    return found, worker_error


def test_three_calls_are_those_of_deepspeed() -> None:
    everyone = run_ranks(_golden, 2)
    for found, _ in everyone:
        for values, halves in zip(found, GOLDEN):
            expected = [scale * (1 if sign == "+" else -1) for scale, signs in halves for sign in signs]
            assert torch.allclose(values, torch.tensor(expected), rtol=0, atol=5.1e-6)  # five decimals are known
    assert torch.allclose(everyone[0][1][:4], torch.tensor(GOLDEN_ERROR), rtol=0, atol=1e-6)


def _simulated(values: Tensor, whole: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean and both errors, from errors of 0, by exact all-reduces."""
    size, rank = zcomm.group_size(), zcomm.group_rank()
    padded = torch.zeros(whole)
    padded[: values.numel()] = values
    sent = _coded(padded)
    mean = sent.clone()
    zcomm.all_reduce(mean)
    mean /= size
    parts = mean.chunk(size)
    coded = [_coded(part) for part in parts]
    return torch.cat(coded)[: values.numel()], padded - sent, parts[rank] - coded[rank]


def _coded(values: Tensor) -> Tensor:
    scale = values.norm() / values.numel() ** 0.5
    return torch.where(values >= 0, scale, -scale)


def _padded() -> None:
    rank, size = zcomm.group_rank(), zcomm.group_size()
    values = torch.randn(1001, generator=torch.Generator().manual_seed(rank))
    whole = 1008 if size == 2 else 1008 + 24 - 1008 % 24
    expected = _simulated(values, whole)
    for backend in (CompressedBackend(), HcclBackend(), MpiBackend(cuda_aware=False)):
        errors = torch.zeros(whole), torch.zeros(whole // size)
        found = backend.compressed_allreduce(values.clone(), *errors, rank)
        for tensor, wanted in zip((found, *errors), expected):
            assert torch.allclose(tensor, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_padding_counts_in_scales_as_in_deepspeed(ranks: int) -> None:
    run_ranks(_padded, ranks)


def _rejected() -> None:
    with pytest.raises(ValueError, match=r"100 elements over 2 ranks with errors of 100 .* allocate 112 and 56"):
        CompressedBackend().compressed_allreduce(torch.ones(100), torch.zeros(100), torch.zeros(50))


def test_errors_of_another_length_are_rejected() -> None:
    run_ranks(_rejected, 2)


def test_one_rank_changes_nothing() -> None:
    values, errors = torch.tensor([3.0, -1.0]), (torch.zeros(8), torch.zeros(8))
    assert CompressedBackend().compressed_allreduce(values, *errors).tolist() == [3.0, -1.0]
    assert not errors[0].any()
