"""Slices of any size, through shared memory and over Gloo."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zcomm
from zcomm.shared import native
from zcomm.testing import run_ranks

NUMELS = [[0, 2, 1], [3, 0, 0], [0, 0, 1]]


def rank_exchanges(transport: str) -> list[list[float]]:
    rank = zcomm.group_rank()
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        given = torch.tensor([[1, 2, 3], [4, 5, 6], [7]][rank], dtype=dtype)
        found.append(zcomm.all_to_all_v(given, NUMELS, label="parts").tolist())
    nothing = zcomm.all_to_all_v(torch.zeros(0), [[0] * 3] * 3)
    assert nothing.numel() == 0
    assert zcomm.transport() == transport
    return found


@pytest.mark.parametrize(("choice", "transport"), [("shared", "shared memory"), ("gloo", "gloo")])
def test_every_rank_receives_its_slices_by_source(
    choice: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZCOMM_TRANSPORT", choice)
    expected = [[4.0, 5.0, 6.0], [1.0, 2.0], [3.0, 7.0]]
    everyone = run_ranks(rank_exchanges, 3, transport)
    assert everyone == [[mine, mine] for mine in expected]


def rank_sends_one_slice(hosts: str) -> tuple[str, int, list[int]]:
    """Send a long slice from rank 0 to rank 1 only; return this rank's slice and the bytes passed to Gloo."""
    os.environ["ZCOMM_HOST"] = hosts[dist.get_rank()]
    numels = [[0, 1000, 0, 0]] + [[0] * 4] * 3
    sent, real = [], dist.all_to_all_single

    def spy(output: torch.Tensor, input: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        sent.append(input.nbytes)
        return real(output, input, *arguments, **options)

    dist.all_to_all_single = spy
    try:
        found = zcomm.all_to_all_v(torch.ones(sum(numels[dist.get_rank()])), numels)
        zcomm.all_to_all_v(torch.ones(2, dtype=torch.complex32), [[1, 1, 0, 0]] * 4)  # memory carries no such
    finally:
        dist.all_to_all_single = real
    return zcomm.transport(), found.numel(), sent


@pytest.mark.skipif(bool(native.unavailable_reason()), reason=native.unavailable_reason())
def test_padding_never_goes_over_gloo() -> None:
    two, one = "shared memory + gloo", "shared memory"
    assert (
        run_ranks(rank_sends_one_slice, 4, "AABB")
        == [(two, 0, [4000, 8]), (two, 1000, [0, 8])] + [(two, 0, [0, 8])] * 2
    )
    assert [(which, sent) for which, _, sent in run_ranks(rank_sends_one_slice, 4, "AAAA")] == [(one, [8])] * 4


def test_alone_the_slice_is_a_copy_of_its_own() -> None:
    given = torch.arange(3.0)
    found = zcomm.all_to_all_v(given, [[3]])
    assert torch.equal(found, given)
    assert found.data_ptr() != given.data_ptr()


def test_mismatched_arguments_are_rejected_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"all_to_all_v 'parts': numels has rows of \[2\] and 1 of them; there are 1"
    ):
        zcomm.all_to_all_v(torch.zeros(3), [[1, 2]], label="parts")
    with pytest.raises(
        ValueError, match=r"all_to_all_v: input has shape \[3\]; rank 0 sends \[4\], so it must be fl"
    ):
        zcomm.all_to_all_v(torch.zeros(3), [[4]])
