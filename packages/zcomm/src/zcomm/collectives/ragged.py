"""Ragged collectives: ranks send different numbers of elements or rows.

Problem.  Expert parallelism, like every sort by owner, has rows sorted by a key of which each rank owns some values.
The message to a rank has one run of rows for each of the owner's keys.  Messages arrive by source, but the owner
needs all rows of a key adjoining.  Reordering them takes one more pass over all received rows, and one more on the
way back, forward and backward.

Design.  `all_to_all_ragged_rows` sends rows to the owners of their keys and delivers them by key.
`return_ragged_rows` with the same counts is its inverse, and each is the gradient of the other.  Through shared
memory every run is copied from the sender's staging buffer straight to its place: nothing is padded to the longest,
nothing is moved twice.  NCCL and Gloo deliver by source; rows are reordered afterwards.  `all_to_all_v` is the case
of one run of elements per rank.  All three take the table of sizes from the caller.

`gather_rows` sends the rows of a sparse gradient, such as an embedding's, to every rank; a dense all_reduce would
move the whole vocabulary for a batch that touches a thousandth of it.  The ranks exchange the lengths first, then
indices and values padded to the longest.

Rejected: counts known to the sender only, for the all-to-alls (one more collective, which callers that know the table
would pay for).
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

from zcomm.collectives import checks
from zcomm.collectives.handles import start
from zcomm.collectives.verbs import all_gather, group_rank, group_size
from zcomm.hangs.fingerprint import Call, call_name
from zcomm.shared import registry
from zcomm.shared.native import is_supported
from zcomm.shared.transport import Message, Routes, Transport

__all__ = ["all_to_all_ragged_rows", "all_to_all_v", "gather_rows", "return_ragged_rows"]

Runs = Sequence[Sequence[int]]  # [rank][key]: rows
Counts = Sequence[Runs]  # [from][to][key]


def all_to_all_v(
    input: Tensor, numels: Sequence[Sequence[int]], group: ProcessGroup | None = None, *, label: str = ""
) -> Tensor:
    """Send `numels[r][s]` elements from rank r to rank s; return the received elements, by source.

    input: flat, contiguous: this rank's elements, by target.  numels: size x size, equal on all ranks.
    Returns a new flat tensor of the same dtype and device.
    Raises ValueError naming the call if input and numels do not fit together.
    """
    size, rank = group_size(group), group_rank(group)
    _check_numels(label, input, numels, size, rank)
    counts = [[(count,) for count in row] for row in numels]
    return _exchange("all_to_all_v", label, input, counts, group)


def all_to_all_ragged_rows(
    input: Tensor, counts: Counts, group: ProcessGroup | None = None, *, label: str = ""
) -> Tensor:
    """Send `counts[r][s][k]` rows of key k from rank r to rank s, the key's owner; deliver each key's rows together.

    input: (rows, ...), contiguous: this rank's rows, by owner and by key.  counts: ranks x ranks x keys of each
    owner, equal on all ranks.  Returns a new tensor (rows, ...), by key and by source.
    Raises ValueError naming the call if input and counts do not fit together.
    """
    _check_counts("all_to_all_ragged_rows", label, input, counts, [list(row) for row in counts], group)
    return _exchange("all_to_all_ragged_rows", label, input, counts, group)


def return_ragged_rows(
    input: Tensor, counts: Counts, group: ProcessGroup | None = None, *, label: str = ""
) -> Tensor:
    """Invert `all_to_all_ragged_rows` of these counts: send rows back to their sources, in their original order.

    input: (rows, ...), contiguous, as `all_to_all_ragged_rows` delivers them.  Raises ValueError likewise.
    """
    _check_counts("return_ragged_rows", label, input, counts, list(zip(*counts)), group)
    return _exchange("return_ragged_rows", label, input, counts, group, is_back=True)


def gather_rows(
    indices: Tensor, values: Tensor, group: ProcessGroup | None = None, *, label: str = ""
) -> list[tuple[Tensor, Tensor]]:
    """Gather every rank's rows as (indices, values), in the order of the ranks.  A collective that waits.

    indices: (n,) int64; values: (n, width) of one dtype and width on all ranks, on the same device; n may differ
    between ranks, and may be 0.
    Raises ValueError if the two do not match.
    """
    if indices.dim() != 1 or values.dim() != 2 or len(indices) != len(values) or indices.dtype is not torch.int64:
        raise ValueError(
            f"gather_rows({label!r}): indices are {indices.dtype} of shape {list(indices.shape)}, values have shape "
            f"{list(values.shape)}; they must be (n,) torch.int64 and (n, width)."
        )
    size = group_size(group)
    if size == 1:
        return [(indices, values)]
    lengths = torch.empty(size, dtype=torch.int64, device=values.device)
    all_gather(lengths, torch.tensor([len(indices)], device=values.device), group, label=f"{label} lengths")
    counts = lengths.tolist()
    most, width = max(counts), values.size(1)
    all_indices = torch.empty(size * most, dtype=torch.int64, device=values.device)
    all_gather(all_indices, _padded(indices, most), group, label=f"{label} indices")
    rows = torch.empty(size * most * width, dtype=values.dtype, device=values.device)
    all_gather(rows, _padded(values, most).view(-1), group, label=f"{label} values")
    shaped = rows.view(size, most, width)
    return [(all_indices[rank * most :][:count], shaped[rank, :count]) for rank, count in enumerate(counts)]


def _exchange(
    op: str, label: str, input: Tensor, counts: Counts, group: ProcessGroup | None, *, is_back: bool = False
) -> Tensor:
    """Exchange rows by checked arguments; `op` is the name of the call in errors.

    Raises ValueError for counts below 0.
    """
    if (least := min((n for row in counts for runs in row for n in runs), default=0)) < 0:
        raise ValueError(f"{call_name(op, label)}: a count is {least}; counts must be 0 or more.")
    size, rank = group_size(group), group_rank(group)
    if size == 1:
        return input.clone()
    here, there = list(counts[rank]), [row[rank] for row in counts]  # [rank][key]
    sent, received = (there, here) if is_back else (here, there)
    output = input.new_empty(sum(map(sum, received)), *input.shape[1:])
    call = _call(op, label, input, counts, size)
    if _uses_shared_memory(input, group):
        routes = _routes(sent, received, counts, math.prod(input.shape[1:]), is_back)
        message = Message("all_to_all_v", output, input, label=label, routes=routes)
        start(call, lambda: registry.issue(group, message), (output, input), async_op=False, group=group)
        return output
    if is_back:
        input = _reorder(input, there, is_back=True)
    lengths = [sum(runs) for runs in received], [sum(runs) for runs in sent]
    start(
        call,
        lambda: dist.all_to_all_single(output, input, *lengths, group=group, async_op=True),
        (output, input),
        async_op=False,
        group=group,
    )
    return output if is_back else _reorder(output, there, is_back=False)


def _call(op: str, label: str, input: Tensor, counts: Counts, size: int) -> Call:
    """Describe the call by the size of the whole table, which is equal on all ranks."""
    shape = (sum(sum(map(sum, row)) for row in counts), *input.shape[1:])
    numel = math.prod(shape)
    return attrs.evolve(
        Call.of(op, label, size, input), numel=numel, nbytes=numel * input.element_size(), shape=shape
    )


def _uses_shared_memory(input: Tensor, group: ProcessGroup | None) -> bool:
    """True if all ranks are on one host and copy; equal on all ranks, as the group's transport is."""
    return (
        input.is_cpu
        and is_supported(input.dtype, reduced=False)
        and isinstance(registry.transport_of(group), Transport)
    )


def _routes(sent: Runs, received: Runs, counts: Counts, width: int, is_back: bool) -> Routes:
    """Build the routes of this rank.  width: elements of a row."""
    others = [sum(runs) for r, row in enumerate(counts) for s, runs in enumerate(row) if r != s]
    table = array("q", (int(is_back), width, *(n for row in counts for runs in row for n in runs)))
    return Routes(
        sends=_offsets(sent, width, by_key=is_back),
        receives=_offsets(received, width, by_key=not is_back),
        longest=max(max(others) * width, int(any(table[2:]))),  # a rank copies its own rows with the first chunk
        checksum=zlib.crc32(table.tobytes()) & 0x7FFFFFFF,
    )


def _offsets(runs: Runs, width: int, *, by_key: bool) -> Tensor:
    """(ranks, keys, 2): offset and length in elements of runs that lie by rank and by key or, `by_key`, by key."""
    lengths = torch.tensor(runs, dtype=torch.int64, device="cpu") * width
    if by_key:
        return torch.stack([_starts(lengths.t()).t(), lengths], dim=-1).contiguous()
    return torch.stack([_starts(lengths), lengths], dim=-1)


def _starts(lengths: Tensor) -> Tensor:
    """Start of each run if they lie one after the other, row by row."""
    return lengths.reshape(-1).cumsum(0).view(lengths.shape) - lengths


def _reorder(rows: Tensor, runs: Runs, *, is_back: bool) -> Tensor:
    """Reorder rows from (rank, key) to (key, rank), or back."""
    if len(runs[0]) == 1:
        return rows
    lengths = torch.tensor(runs, dtype=torch.int64, device="cpu")
    run = lengths.t().reshape(-1)
    shift = _starts(lengths).t().reshape(-1) - _starts(run)  # old offset of a run, minus its new one
    order = torch.arange(rows.shape[0], device="cpu") + shift.repeat_interleave(run)
    return rows.index_select(0, (order.argsort() if is_back else order).to(rows.device))


def _check_numels(label: str, input: Tensor, numels: Sequence[Sequence[int]], size: int, rank: int) -> None:
    checks.dense("all_to_all_v", label, "input", input)
    if len(numels) != size or any(len(row) != size for row in numels):
        raise ValueError(
            f"{call_name('all_to_all_v', label)}: numels has rows of {sorted({len(row) for row in numels})} and "
            f"{len(numels)} of them; there are {size} ranks, so it must be {size} x {size}."
        )
    if input.dim() != 1 or input.numel() != sum(numels[rank]):
        raise ValueError(
            f"{call_name('all_to_all_v', label)}: input has shape {list(input.shape)}; rank {rank} sends "
            f"{list(numels[rank])}, so it must be flat with {sum(numels[rank])} elements."
        )


def _check_counts(
    op: str, label: str, input: Tensor, counts: Counts, sends: Sequence[Runs], group: ProcessGroup | None
) -> None:
    """Raise ValueError unless counts and input fit the group.  sends: [from][to][key]."""
    size, rank = group_size(group), group_rank(group)
    checks.dense(op, label, "input", input)
    keys = {len(runs) for row in counts for runs in row}
    if len(counts) != size or any(len(row) != size for row in counts) or len(keys) != 1:
        raise ValueError(
            f"{call_name(op, label)}: counts has {len(counts)} x {sorted({len(row) for row in counts})} x "
            f"{sorted(keys)} numbers; there are {size} ranks, so it must be {size} x {size} x the keys of a rank."
        )
    total = sum(map(sum, sends[rank]))
    if input.dim() == 0 or input.shape[0] != total:
        raise ValueError(
            f"{call_name(op, label)}: input has shape {list(input.shape)}; rank {rank} sends "
            f"{[list(runs) for runs in sends[rank]]} rows, so it must have {total}."
        )


def _padded(tensor: Tensor, length: int) -> Tensor:
    """Contiguous copy, padded with rows of zeros to `length`."""
    made = tensor.new_zeros(length, *tensor.shape[1:])
    made[: len(tensor)] = tensor
    return made
