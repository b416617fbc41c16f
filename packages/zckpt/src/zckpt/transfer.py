"""From bytes of a file into live tensors, on any device, by runs.

Reads are windows: neighbouring runs of a file are fetched together when the gap between them is smaller than what
a further read costs, and none is larger than 16 MiB, so the extra memory is bounded whatever the tensor.  A window
that is one run goes straight into the tensor's memory if that is on the CPU.  Otherwise its runs are copied in as
few calls as their pattern allows: equally long, equally spaced runs are one strided copy (a column block of a
matrix is exactly that); what has no pattern is one indexed copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import attrs
import numpy as np
import torch
from torch import Tensor

from .regions import Offsets, Runs
from .safefile import byte_view, unit_stride
from .storage import Reader

WINDOW_NBYTES = 8 << 20  # a window spans less than twice this
GAP_NBYTES = 64 << 10  # bytes read and thrown away rather than starting another read

_STRIDED_NUMEL = 2048  # a strided copy of fewer elements costs more than indexing them one by one
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@attrs.frozen
class Source:
    """Where a piece's elements lie."""

    reader: Reader
    offset: int  # of element 0, in bytes
    dtype: torch.dtype


def fill(target: Tensor, source: Source, batches: Iterable[Runs]) -> int:
    """Copy the runs from the file into `target`, (n,) contiguous, converting its dtype; returns the bytes read."""
    target, read_nbytes = unit_stride(target), 0
    scratch = torch.empty(0, dtype=source.dtype)
    for batch in batches:
        for runs in windows(batch, source.dtype.itemsize):
            numel = int(runs.source[-1] + runs.length[-1] - runs.source[0])
            read_nbytes += numel * source.dtype.itemsize
            if len(runs) == 1 and target.device.type == "cpu" and target.dtype == source.dtype:
                start = int(runs.target[0])
                _read(source, int(runs.source[0]), target[start : start + numel])
                continue
            if scratch.numel() < numel:
                scratch = torch.empty(numel, dtype=source.dtype)
            _fill_window(target, source, runs, scratch[:numel])
    return read_nbytes


def windows(runs: Runs, itemsize: int) -> Iterator[Runs]:
    """The same runs in groups that are worth one read each; long runs are split."""
    limit = WINDOW_NBYTES // itemsize
    if len(runs) == 1 and int(runs.length[0]) <= limit:
        yield runs
        return
    runs = _split(runs, limit)
    gaps = runs.source[1:] - (runs.source[:-1] + runs.length[:-1])
    cuts = (gaps * itemsize > GAP_NBYTES) | (runs.source[1:] // limit != runs.source[:-1] // limit)
    edges = [0, *(np.flatnonzero(cuts) + 1).tolist(), len(runs)]
    for start, stop in itertools.pairwise(edges):
        part = slice(start, stop)
        yield Runs(target=runs.target[part], source=runs.source[part], length=runs.length[part])


def _split(runs: Runs, limit: int) -> Runs:
    if len(runs) == 0 or int(runs.length.max()) <= limit:
        return runs
    counts = -(-runs.length // limit)
    shift = limit * _positions(counts)
    return Runs(
        target=np.repeat(runs.target, counts) + shift,
        source=np.repeat(runs.source, counts) + shift,
        length=np.minimum(np.repeat(runs.length, counts) - shift, limit),
    )


def _positions(counts: Offsets) -> Offsets:
    """0, 1 .. counts[0]-1, 0, 1 .. counts[1]-1, and so on."""
    starts = np.cumsum(counts) - counts
    made: Offsets = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(starts, counts)
    return made


def _fill_window(target: Tensor, source: Source, runs: Runs, data: Tensor) -> None:
    """Through `data`, a CPU buffer of the window's size."""
    first = int(runs.source[0])
    _read(source, first, data)
    here = Runs(target=runs.target, source=runs.source - first, length=runs.length)
    copy_runs(target, data.to(device=target.device, dtype=target.dtype), here)


def _read(source: Source, first: int, into: Tensor) -> None:
    source.reader.read_into(source.offset + first * source.dtype.itemsize, byte_view(into))


def copy_runs(target: Tensor, source: Tensor, runs: Runs) -> None:
    """Copy runs between two 1-D contiguous tensors of one dtype and device."""
    plain = _SAME_SIZE[target.element_size()]  # copies bits, and works where a dtype has no indexing
    target, source = target.view(plain), source.view(plain)
    groups = _patterns(runs)
    if len(groups) > 16 and int(runs.length.sum()) < _STRIDED_NUMEL * len(groups):
        within = _positions(runs.length)
        into = torch.from_numpy(np.repeat(runs.target, runs.length) + within)
        take = torch.from_numpy(np.repeat(runs.source, runs.length) + within)
        target[into.to(target.device)] = source[take.to(source.device)]
        return
    for start, stop in groups:
        step = min(start + 1, stop - 1)  # the run after the first, or the first itself
        count, length = stop - start, int(runs.length[start])
        target_step = max(int(runs.target[step] - runs.target[start]), 1)
        source_step = max(int(runs.source[step] - runs.source[start]), 1)
        into = target.as_strided((count, length), (target_step, 1), target.storage_offset() + int(runs.target[start]))
        take = source.as_strided((count, length), (source_step, 1), source.storage_offset() + int(runs.source[start]))
        into.copy_(take)


def _patterns(runs: Runs) -> list[tuple[int, int]]:
    """[start, stop) of the stretches of runs that have one length and one distance on each side."""
    if len(runs) <= 2:
        return [(i, i + 1) for i in range(len(runs))]
    target_steps, source_steps = np.diff(runs.target), np.diff(runs.source)
    breaks = [0]
    # Step i leads from run i to i+1; a stretch of runs a..b needs equal lengths a..b and equal steps a..b-1.
    odd = (target_steps[1:] != target_steps[:-1]) | (source_steps[1:] != source_steps[:-1])
    cut_before = np.flatnonzero((runs.length[1:] != runs.length[:-1]) | np.append(odd, False)) + 1
    breaks += cut_before.tolist()
    return list(itertools.pairwise([*breaks, len(runs)]))
