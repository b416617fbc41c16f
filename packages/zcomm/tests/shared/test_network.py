"""The connection between hosts: messages, and failures."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from zcomm.shared import network as module
from zcomm.shared.failure import SharedMemoryFailed
from zcomm.shared.network import Network
from zcomm.testing import run_ranks

LONG_S = 300.0  # the time limit of what must fail before: run_ranks waits for a minute


def network(key: str) -> Network:
    size = dist.get_world_size()
    return Network.open(key, tuple(range(10, 10 + size)), dist.get_rank(), LONG_S)


def rank_moves(long_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LONG_BYTES", long_bytes)
        moves()


def moves() -> None:
    found, size, rank = network("moves"), dist.get_world_size(), dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64):
        pieces = [torch.full((host + 1,), float(host == rank) * (host + 1)).to(dtype) for host in range(size)]
        found.gather(pieces).wait()
        assert all(piece.equal(torch.full((host + 1,), host + 1.0).to(dtype)) for host, piece in enumerate(pieces))
        tensor = torch.full((5,), float(rank)).to(dtype)
        found.broadcast(tensor, size - 1).wait()
        assert tensor.equal(torch.full((5,), size - 1.0).to(dtype))
        output = torch.empty(size, rank + 2, dtype=dtype)
        found.exchange(output, [torch.full((host + 2,), float(rank)).to(dtype) for host in range(size)]).wait()
        output[rank] = float(rank)
        assert output.equal(torch.arange(float(size)).to(dtype).view(-1, 1).expand(size, rank + 2))
    found.barrier().wait()
    found.close()
    found.close()
    with pytest.raises(SharedMemoryFailed, match="has closed the group"):
        found.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("long_bytes", [module.LONG_BYTES, 0])
def test_bytes_of_every_dtype_arrive(world_size: int, long_bytes: int) -> None:
    run_ranks(rank_moves, world_size, long_bytes)


def rank_hangs_up() -> list[str]:
    """Abort on host 0; the other hosts fail before the time limit."""
    found = network("breaks")
    begun = found.barrier() if dist.get_rank() == 0 else None
    if begun is not None:
        found.abort()
    dist.barrier()
    texts = []
    for traffic in (begun or found.barrier(), found.barrier()):
        with pytest.raises(SharedMemoryFailed) as caught:
            traffic.wait()
        texts.append(str(caught.value))
    found.close()
    return texts


def test_hanging_up_reaches_all_hosts_long_before_the_time_limit() -> None:
    for rank, texts in enumerate(run_ranks(rank_hangs_up, 3)):
        others = ", ".join(str(10 + other) for other in range(3) if other != rank)
        assert all(text.startswith(f"between hosts, with ranks {others}: ") for text in texts)
