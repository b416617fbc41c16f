"""Tensors go round a ring: each rank hands them to the next and gets those of the one before, while it computes.

All that travels at one time is posted together, which NCCL needs where everybody sends and receives.  The receiving
side is new memory: what is being sent may still be read.
"""

from __future__ import annotations

from typing import Any, final

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from zpartition.cells import Cell

__all__ = ["NOTHING_UNDER_WAY", "UnderWay", "hand_on"]


@final
@attrs.frozen(eq=False)
class UnderWay:
    """What has been handed on and what is about to arrive."""

    requests: tuple[Any, ...]
    sent: tuple[Tensor, ...]  # kept alive until they have left
    arriving: tuple[Tensor, ...]

    def wait(self) -> tuple[Tensor, ...]:
        """What arrived, in the order in which it was handed on by the rank before."""
        for request in self.requests:
            request.wait()
        return self.arriving


NOTHING_UNDER_WAY = UnderWay((), (), ())


def hand_on(tensors: tuple[Tensor, ...], cell: Cell) -> UnderWay:
    """Send these to the next rank of the cell; the ones of the rank before, as large, begin to arrive."""
    if cell.size == 1:
        return UnderWay((), (), tensors)
    sent = tuple(tensor.contiguous() for tensor in tensors)
    arriving = tuple(torch.empty_like(tensor) for tensor in sent)
    to, source = (cell.rank + 1) % cell.size, (cell.rank - 1) % cell.size
    posted = []
    for out, come in zip(sent, arriving):
        posted.append(dist.P2POp(dist.isend, out, group=cell.group, group_peer=to))
        posted.append(dist.P2POp(dist.irecv, come, group=cell.group, group_peer=source))
    return UnderWay(tuple(dist.batch_isend_irecv(posted)), sent, arriving)
