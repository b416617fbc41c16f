"""Quantized collectives, against the exact ones."""

from __future__ import annotations

import pytest
import torch

import zcomm
from zcomm import BlockCode
from zcomm.testing import recorded, run_ranks

NUMEL = 700  # of a slice: two blocks and a tail


def _values(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def _gathers() -> None:
    size, rank = zcomm.group_size(), zcomm.group_rank()
    for code in (BlockCode(bits=8), BlockCode(bits=4)):
        output = torch.empty(size * NUMEL)
        message = code.encode(_values(rank, NUMEL))
        with recorded() as log:
            handle = zcomm.all_gather_quantized(output, message, code=code, async_op=True, label="w")
            handle.wait()
            handle.wait()
            assert handle.is_done()
        expected = [code.decode(code.encode(_values(r, NUMEL)), torch.empty(NUMEL)) for r in range(size)]
        assert torch.equal(output, torch.cat(expected)), "the sender sees what the others see"
        assert log.nbytes() == (size * code.num_bytes(NUMEL) if size > 1 else 0)
        again, received = torch.empty(size * NUMEL), torch.empty(size * message.numel(), dtype=torch.uint8)
        assert zcomm.all_gather_quantized(again, message, code=code, received=received) is zcomm.DONE
        assert torch.equal(again, output)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_gather_decodes_what_every_rank_has_encoded(world_size: int) -> None:
    run_ranks(_gathers, world_size)


def _bound(parts: list[torch.Tensor], code: BlockCode) -> torch.Tensor:
    """Return the error bound of a sum of encoded addends: the sum of their blocks' bounds."""
    total = torch.zeros(parts[0].numel())
    for part in parts:
        padded = torch.nn.functional.pad(part, (0, -part.numel() % code.block)).view(-1, code.block)
        largest = padded.abs().amax(dim=1, keepdim=True).expand_as(padded).reshape(-1)
        total += largest[: part.numel()] * (code.relative_error + 2.0**-20)
    return total


def _reduces(dtype_name: str) -> torch.Tensor:
    size, rank = zcomm.group_size(), zcomm.group_rank()
    dtype = getattr(torch, dtype_name)
    everyone = [_values(r, size * NUMEL).to(dtype) for r in range(size)]
    mine = slice(rank * NUMEL, (rank + 1) * NUMEL)
    exact = torch.stack([each[mine].double() for each in everyone]).sum(0)
    code = BlockCode(bits=4)
    others = [each[mine].float() for r, each in enumerate(everyone) if r != rank] or [torch.zeros(NUMEL)]
    output = torch.empty(NUMEL, dtype=dtype)
    with recorded() as log:
        zcomm.reduce_scatter_quantized(output, everyone[rank], label="g")
    rounding = exact.abs() * torch.finfo(dtype).eps
    assert bool(((output.double() - exact).abs() <= _bound(others, code) + rounding + 1e-6).all())
    assert log.nbytes() == (size * code.num_bytes(NUMEL) if size > 1 else 0)
    in_place = everyone[rank].clone()
    handle = zcomm.reduce_scatter_quantized(in_place[mine], in_place, async_op=True)
    in_place[:] = float("nan")  # the caller's again
    handle.wait()
    assert torch.equal(in_place[mine], output), "in place, and on every run"
    return output.float()


@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_sum_is_within_the_bounds_of_its_contributions(world_size: int, dtype_name: str) -> None:
    run_ranks(_reduces, world_size, dtype_name)


def _reduces_in_two_hops() -> None:
    rank = zcomm.group_rank()
    mesh = zcomm.make_mesh(host=2, place=2)
    inner, outer = zcomm.axis_group(mesh, "place"), zcomm.axis_group(mesh, "host")
    everyone = [_values(r, 4 * NUMEL) for r in range(4)]
    mine = slice(rank * NUMEL, (rank + 1) * NUMEL)
    code = BlockCode(bits=8)
    output = torch.empty(NUMEL)
    with recorded() as log:
        zcomm.reduce_scatter_quantized(output, everyone[rank], groups=(inner, outer), code=code, label="g")
    parts = [each[mine] for each in everyone]
    hosts = [parts[0] + parts[1], parts[2] + parts[3]]
    exact = hosts[0] + hosts[1]
    assert bool(((output - exact).abs() <= _bound(parts, code) + 1.01 * _bound(hosts, code)).all())
    assert [(r.label, r.group_size) for r in log.records] == [("g", 2), ("g between", 2)]
    between = log.records[1].nbytes
    assert between == 2 * code.num_bytes(NUMEL), "only sums over a host go between hosts"
    poisoned = everyone[rank].clone()
    if rank == 3:
        poisoned[NUMEL + 1] = float("inf")  # of rank 1's slice
    zcomm.reduce_scatter_quantized(output, poisoned, groups=(inner, outer), code=code)
    assert bool(output.isfinite().all()) == (rank != 1)


def test_two_hops_leave_every_rank_its_own_slice_within_the_bounds() -> None:
    run_ranks(_reduces_in_two_hops, 4)


def test_mismatched_arguments_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"all_gather_quantized 'w': message has 5 elements of torch.uint8; 8 elem"):
        zcomm.all_gather_quantized(torch.empty(8), torch.empty(5, dtype=torch.uint8), label="w")
    message, room = BlockCode().encode(torch.ones(32)), torch.empty(300, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"all_gather_quantized 'w': output of shape \[4, 8\].* is not contiguous"):
        zcomm.all_gather_quantized(torch.empty(8, 4).t(), message, label="w")
    for received in (room[1:261], room[:259], room.view(torch.int8)[:260]):
        with pytest.raises(
            ValueError, match=r"all_gather_quantized 'w': received has .* have 260 of torch.uint8, at"
        ):
            zcomm.all_gather_quantized(torch.empty(32), message, received=received, label="w")
    output = torch.empty(32)
    zcomm.all_gather_quantized(output, message, received=room[4:264])
    assert output.eq(1).all()
    with pytest.raises(ValueError, match=r"reduce_scatter_quantized 'g': 8 elements of torch.int64 cannot be quant"):
        zcomm.reduce_scatter_quantized(torch.zeros(8).long(), torch.zeros(8).long(), label="g")
    with pytest.raises(ValueError, match=r"reduce_scatter_quantized 'g': input has 8 elements, output has 4"):
        zcomm.reduce_scatter_quantized(torch.zeros(4), torch.zeros(8), label="g")
