"""Gather and scatter over Gloo without the copies that torch makes around them.

torch's Gloo back end gathers into a fresh flat buffer and copies out of it, and its reduce_scatter is slower than its
all_reduce.  Measured on two CPU ranks of one host, 64 MiB of fp32 (milliseconds): all_gather 161, a broadcast of each
rank's slice straight into the output 32; reduce_scatter 127-151, all_reduce 62.  So a gather is W broadcasts, and a
scatter whose output lies in its input, where the other slices are undefined anyway, is an all_reduce.  The latter has
a useful side effect: sharded and replicated gradients are summed in the same order, so they are equal bit for bit at
any number of ranks.

Used where `zcomm.shared`, which is faster still, is not available, wholly or inside the hosts.

Rejected: send and receive between all pairs (as fast at two ranks, but W * (W - 1) messages, and every rank must
agree on tags).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zcomm import compat
from zcomm.hangs.observer import ABORTED, observer


@final
@attrs.frozen(eq=False)
class Works:
    """Works of one collective that count as one."""

    works: Sequence[Any]  # torch.distributed.Work

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


_SLICE = timedelta(seconds=1)


def wait_slice(work: dist.Work) -> bool:
    """Wait for a collective for at most a second, without harm to it.  True if it is done.

    Raises the collective's error.
    """
    try:
        work.wait(_SLICE)
        return True
    except RuntimeError:  # the end of the slice, or the collective's own error
        if not work.is_completed():
            return False
    work.wait()  # raises that error again, and none where the collective ended just after the slice
    return True


def is_used(tensor: Tensor, group: ProcessGroup | None) -> bool:
    """True if `tensor` would travel over Gloo."""
    return tensor.device.type == "cpu" and "gloo" in compat.backend_of(group)


def all_gather(output: Tensor, input: Tensor, group: ProcessGroup | None, *, size: int, rank: int) -> Works:
    """Write every rank's `input` into its slice of `output`; takes the checked arguments of `zcomm.all_gather`."""
    slices = output.view(torch.uint8).chunk(size) if output.numel() else ()
    if slices and slices[rank].data_ptr() != input.data_ptr():
        slices[rank].copy_(input.view(torch.uint8))
    senders = range(size) if group is None else [dist.get_global_rank(group, index) for index in range(size)]
    return Works([dist.broadcast(s, src=i, group=group, async_op=True) for s, i in zip(slices, senders)])


_CALL_NBYTES = 160  # of a call's description in a comparison; longer ones are cut in the middle


def compare_calls(call: str, group: ProcessGroup | None, *, size: int, rank: int) -> None:
    """Compare the description of a collective over the ranks, before they issue it.

    A message of its own, of a size that does not depend on the call: it matches whatever the ranks do next.
    Raises RuntimeError on every rank; names a call that differs, and its rank.
    """
    text = call.encode()
    if len(text) > _CALL_NBYTES:
        text = text[: _CALL_NBYTES // 2] + text[-_CALL_NBYTES // 2 :]
    mine = torch.frombuffer(bytearray(text.ljust(_CALL_NBYTES)), dtype=torch.uint8)
    rows = torch.empty(size * _CALL_NBYTES, dtype=torch.uint8)
    work = all_gather(rows, mine, group, size=size, rank=rank)
    for part in work.works:
        while not wait_slice(part):
            if observer().is_aborted():
                raise RuntimeError(ABORTED)
    calls = [bytes(row.tolist()).decode(errors="replace").rstrip() for row in rows.view(size, -1)]
    for other, theirs in enumerate(calls):
        if theirs != calls[0]:
            ranks = [number if group is None else dist.get_global_rank(group, number) for number in (0, other)]
            raise RuntimeError(f"the ranks disagree: rank {ranks[0]} calls {calls[0]}, rank {ranks[1]} {theirs}.")
