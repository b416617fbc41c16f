"""Rows that ranks trade in runs of any length, sorted on their way.

Problem.  Layers of experts, and whoever sorts things by owner, have rows sorted by a key of which each rank owns some
values.  What goes to a rank is one piece, and in it a run of rows for each of the owner's keys.  What arrives comes
by source, and its owner wants it by key: all rows of a key in one piece.  Putting them so is one more pass over all
that was received, and one more on the way back, forward and backward.

Design.  `collect_runs` sends rows to the owners of their keys and delivers them by key; `return_runs` with the same
counts is its inverse, and each is the other's gradient.  Through shared memory every run is put where it belongs when
it is copied out of the sender's staging buffer: nothing is padded to the longest and nothing is moved twice.  NCCL
and Gloo deliver by source; there rows are put in order afterwards.  `exchange_slices` is the case of one run.

Rejected: counts that only the sender knows (a collective more, which callers that know the table would pay for).
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zcomm import checks
from zcomm.collectives import group_rank, group_size
from zcomm.handles import Call, named, start
from zcomm.shared import registry
from zcomm.shared.names import is_carried
from zcomm.shared.transport import Message, Routes, Transport

__all__ = ["collect_runs", "return_runs", "trade"]

Runs = Sequence[Sequence[int]]  # [rank][key]: rows
Counts = Sequence[Runs]  # [from][to][key]


def collect_runs(input: Tensor, counts: Counts, group: ProcessGroup | None = None, *, label: str = "") -> Tensor:
    """Send `counts[r][s][k]` rows of key k from rank r to rank s, the key's owner; each key's rows arrive adjoining.

    input: (rows, ...), contiguous: what this rank sends, by owner and by key.  counts: ranks x ranks x keys of each
    owner, the same on all ranks.  Returns (rows, ...), new, by key and by source.  Raises ValueError naming the call
    if input and counts do not fit.
    """
    _check("collect_runs", label, input, counts, [list(row) for row in counts], group)
    return trade("collect_runs", label, input, counts, group)


def return_runs(input: Tensor, counts: Counts, group: ProcessGroup | None = None, *, label: str = "") -> Tensor:
    """Undo `collect_runs` of these counts: rows go back to where they came from, in the order that they had there.

    input: (rows, ...), contiguous, as `collect_runs` delivers them.  Raises ValueError as that.
    """
    _check("return_runs", label, input, counts, list(zip(*counts)), group)
    return trade("return_runs", label, input, counts, group, is_back=True)


def trade(
    op: str, label: str, input: Tensor, counts: Counts, group: ProcessGroup | None, *, is_back: bool = False
) -> Tensor:
    """What `collect_runs` delivers, or `return_runs`, of arguments that fit; `op` is how errors call it.

    Raises ValueError for counts below 0.
    """
    if (least := min((n for row in counts for runs in row for n in runs), default=0)) < 0:
        raise ValueError(f"{named(op, label)}: a count is {least}; no rank can send fewer than 0.")
    size, rank = group_size(group), group_rank(group)
    if size == 1:
        return input.clone()
    here, there = list(counts[rank]), [row[rank] for row in counts]  # [rank][key]
    sent, received = (there, here) if is_back else (here, there)
    output = input.new_empty(sum(map(sum, received)), *input.shape[1:])
    call = _call(op, label, input, counts, size)
    if _goes_through_memory(input, group):
        routes = _routes(sent, received, counts, math.prod(input.shape[1:]), is_back)
        message = Message("exchange", output, input, label=label, routes=routes)
        start(call, lambda: registry.issue(group, message), (output, input), async_op=False, group=group)
        return output
    if is_back:
        input = _reordered(input, there, is_back=True)
    lengths = [sum(runs) for runs in received], [sum(runs) for runs in sent]
    start(
        call,
        lambda: dist.all_to_all_single(output, input, *lengths, group=group, async_op=True),
        (output, input),
        async_op=False,
        group=group,
    )
    return output if is_back else _reordered(output, there, is_back=False)


def _call(op: str, label: str, input: Tensor, counts: Counts, size: int) -> Call:
    """The whole table is what the ranks have in common, not what one of them sends."""
    shape = (sum(sum(map(sum, row)) for row in counts), *input.shape[1:])
    numel = math.prod(shape)
    return attrs.evolve(
        Call.of(op, label, size, input), numel=numel, nbytes=numel * input.element_size(), shape=shape
    )


def _goes_through_memory(input: Tensor, group: ProcessGroup | None) -> bool:
    """Whether the ranks are on one host and copy; the same on all of them, a group's transport being theirs."""
    return (
        input.is_cpu
        and is_carried(input.dtype, reduced=False)
        and isinstance(registry.transport_of(group), Transport)
    )


def _routes(sent: Runs, received: Runs, counts: Counts, width: int, is_back: bool) -> Routes:
    """width: elements of a row."""
    others = [sum(runs) for r, row in enumerate(counts) for s, runs in enumerate(row) if r != s]
    table = array("q", (int(is_back), width, *(n for row in counts for runs in row for n in runs)))
    return Routes(
        sends=_placed(sent, width, by_key=is_back),
        receives=_placed(received, width, by_key=not is_back),
        longest=max(max(others) * width, int(any(table[2:]))),  # what ranks keep is copied with the first chunk
        checksum=zlib.crc32(table.tobytes()) & 0x7FFFFFFF,
    )


def _placed(runs: Runs, width: int, *, by_key: bool) -> Tensor:
    """(ranks, keys, 2): place and length in elements, where runs of all ranks lie by rank and by key, or `by_key`."""
    lengths = torch.tensor(runs, dtype=torch.int64, device="cpu") * width
    if by_key:
        return torch.stack([_starts(lengths.t()).t(), lengths], dim=-1).contiguous()
    return torch.stack([_starts(lengths), lengths], dim=-1)


def _starts(lengths: Tensor) -> Tensor:
    """Where each begins if they lie one after the other, row by row."""
    return lengths.reshape(-1).cumsum(0).view(lengths.shape) - lengths


def _reordered(rows: Tensor, runs: Runs, *, is_back: bool) -> Tensor:
    """Rows in runs by rank and by key, put by key and by rank; or back."""
    if len(runs[0]) == 1:
        return rows
    lengths = torch.tensor(runs, dtype=torch.int64, device="cpu")
    run = lengths.t().reshape(-1)
    shift = _starts(lengths).t().reshape(-1) - _starts(run)  # from where a run comes to lie to where it is
    order = torch.arange(rows.shape[0], device="cpu") + shift.repeat_interleave(run)
    return rows.index_select(0, (order.argsort() if is_back else order).to(rows.device))


def _check(
    op: str, label: str, input: Tensor, counts: Counts, sends: Sequence[Runs], group: ProcessGroup | None
) -> None:
    """sends: [from][to][key]."""
    size, rank = group_size(group), group_rank(group)
    checks.dense(op, label, "input", input)
    keys = {len(runs) for row in counts for runs in row}
    if len(counts) != size or any(len(row) != size for row in counts) or len(keys) != 1:
        raise ValueError(
            f"{named(op, label)}: counts has {len(counts)} x {sorted({len(row) for row in counts})} x {sorted(keys)} "
            f"numbers; there are {size} ranks, so it must be {size} x {size} x the keys of a rank."
        )
    total = sum(map(sum, sends[rank]))
    if input.dim() == 0 or input.shape[0] != total:
        raise ValueError(
            f"{named(op, label)}: input has shape {list(input.shape)}; rank {rank} sends "
            f"{[list(runs) for runs in sends[rank]]} rows, so it must have {total}."
        )
