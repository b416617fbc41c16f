"""Copying of runs from a file into live tensors on any device, verifying each byte on the way.

Reads are windows: neighbouring runs of a file are read together if the gap between them costs less than another
read.  No window is larger than 16 MiB, so the extra memory is bounded for any tensor.  A window is rounded out to
whole chunks, since only a whole chunk has a checksum; windows never share a chunk.

A window of one run is read into the tensor's memory if that is on the CPU, and hashed there while it is in cache;
only chunks that extend past its ends pass through a buffer.  The runs of other windows are copied in as few calls as
their pattern allows: equally long, equally spaced runs (such as a column block of a matrix) are one strided copy,
irregular ones one indexed copy.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import final

import attrs
import numpy as np
import torch
from torch import Tensor

from zckpt.format.chunks import NoChecks
from zckpt.format.regions import Offsets, Runs
from zckpt.storage.safetensors_file import byte_view, unit_stride
from zckpt.storage.storage import Reader

WINDOW_NBYTES = 8 << 20  # a window spans at most this, before it is rounded out
GAP_NBYTES = 64 << 10  # largest gap that is read and discarded instead of starting another read

_STRIDED_NUMEL = 2048  # a strided copy of fewer elements is slower than an indexed copy
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@attrs.frozen
class PieceSource:
    """Location of a piece's elements, and its checksums."""

    reader: Reader
    offset: int  # of element 0, in bytes
    dtype: torch.dtype
    checks: NoChecks = attrs.field(factory=NoChecks)

    def read(self, start: int, into: Tensor) -> None:
        """Read and verify bytes of the piece from `start` into `into`, (n,) uint8 on the CPU, in cache-sized steps.

        `start` and the end are values of `checks.bounds`, or edges of chunks.
        """
        data = byte_view(into)
        for begin, stop in self._steps(start, start + len(into)):
            part = data[begin - start : stop - start]
            self.reader.read_into(self.offset + begin, part)
            self.checks.check(begin, part)

    def verify(self, start: int, end: int, scratch: Scratch) -> None:
        """Read and verify bytes [start, end), limited as in `read`, through one buffer that stays in cache."""
        for begin, stop in self._steps(start, end):
            part = byte_view(scratch.bytes(stop - begin))
            self.reader.read_into(self.offset + begin, part)
            self.checks.check(begin, part)

    def _steps(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Whole chunks, about as large as the reader recommends."""
        granule = self.checks.granule
        step = granule * max(1, self.reader.step_nbytes // granule)
        while start < end:
            stop = min((start // step + 1) * step, end)
            yield start, stop
            start = stop


@final
class Scratch(threading.local):
    """A buffer per thread, reused: allocating fresh memory costs more than reading into it."""

    def __init__(self) -> None:
        self.data = torch.empty(0, dtype=torch.uint8)

    def bytes(self, nbytes: int, pinned: bool = False) -> Tensor:
        """(nbytes,) uint8 on the CPU; valid until the next call in this thread."""
        if len(self.data) < nbytes or (pinned and not self.data.is_pinned()):
            self.data = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        return self.data[:nbytes]


def fill(target: Tensor, source: PieceSource, batches: Iterable[Runs], scratch: Scratch | None = None) -> int:
    """Copy the runs from the file into `target`, (n,) contiguous, converting the dtype; return the bytes read."""
    target, scratch, read_nbytes = unit_stride(target), scratch or Scratch(), 0
    is_plain = target.device.type == "cpu" and target.dtype == source.dtype
    for runs in _windows_of(batches, source):
        if len(runs) == 1 and is_plain:
            start = int(runs.target[0])
            read_nbytes += _fill_direct(target[start : start + int(runs.length[0])], source, runs, scratch)
        else:
            read_nbytes += _fill_window(target, source, runs, scratch)
    return read_nbytes


def verify_runs(source: PieceSource, batches: Iterable[Runs], scratch: Scratch) -> int:
    """Read and verify what `fill` would read, except verified chunks; return the bytes read."""
    read_nbytes = 0
    for runs in _windows_of(batches, source):
        start, stop = _extent(runs, source)
        if not source.checks.is_verified(start, stop):
            low, high = source.checks.bounds(start, stop)
            source.verify(low, high, scratch)
            read_nbytes += high - low
    return read_nbytes


def _windows_of(batches: Iterable[Runs], source: PieceSource) -> Iterator[Runs]:
    itemsize = source.dtype.itemsize
    for batch in batches:
        yield from windows(batch, itemsize, source.checks.granule // itemsize)


def _extent(runs: Runs, source: PieceSource) -> tuple[int, int]:
    """First and last byte of the piece that a window of runs spans."""
    itemsize = source.dtype.itemsize
    return int(runs.source[0]) * itemsize, int(runs.source[-1] + runs.length[-1]) * itemsize


def windows(runs: Runs, itemsize: int, granule: int = 1) -> Iterator[Runs]:
    """Group runs into windows, one read each; long runs are split where windows meet.

    `granule`: elements per chunk; a chunk belongs to one window only.
    """
    limit = WINDOW_NBYTES // itemsize
    runs = _split(runs, limit)
    if len(runs) == 1:
        yield runs
        return
    ends = runs.source[:-1] + runs.length[:-1]
    starts = runs.source[1:]
    apart = ((starts - ends) * itemsize > GAP_NBYTES) & (starts // max(granule, 1) > (ends - 1) // max(granule, 1))
    cuts = apart | (starts // limit != runs.source[:-1] // limit)
    edges = [0, *(np.flatnonzero(cuts) + 1).tolist(), len(runs)]
    for start, stop in itertools.pairwise(edges):
        part = slice(start, stop)
        yield Runs(target=runs.target[part], source=runs.source[part], length=runs.length[part])


def _split(runs: Runs, limit: int) -> Runs:
    """Split runs at every multiple of `limit` in the source."""
    first, last = runs.source // limit, (runs.source + runs.length - 1) // limit
    counts = last - first + 1
    if len(runs) == 0 or int(counts.max()) == 1:
        return runs
    edge = (np.repeat(first, counts) + _positions(counts)) * limit
    source, target = np.repeat(runs.source, counts), np.repeat(runs.target, counts)
    begin = np.maximum(edge, source)
    stop = np.minimum(edge + limit, source + np.repeat(runs.length, counts))
    return Runs(target=target + (begin - source), source=begin, length=stop - begin)


def _positions(counts: Offsets) -> Offsets:
    """0, 1 .. counts[0]-1, 0, 1 .. counts[1]-1, and so on."""
    starts = np.cumsum(counts) - counts
    made: Offsets = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(starts, counts)
    return made


def _fill_direct(target: Tensor, source: PieceSource, runs: Runs, scratch: Scratch) -> int:
    """Read one run into CPU memory of its dtype; target (length,)."""
    start, stop = _extent(runs, source)
    low, high = source.checks.bounds(start, stop)
    granule = source.checks.granule
    # [body, end) is read in place: from the first chunk edge at or after `start` to the last at or before `stop`.
    body = start if low == start else min(low + granule, stop)
    end = stop if high == stop else max((stop - 1) // granule * granule, body)
    memory = target.view(torch.uint8)
    if low < body:
        piece = scratch.bytes(min(low + granule, high) - low)
        source.read(low, piece)
        memory[: body - start].copy_(piece[start - low : body - low])
    if body < end:
        source.read(body, memory[body - start : end - start])
    if end < stop:
        piece = scratch.bytes(high - end)
        source.read(end, piece)
        memory[end - start :].copy_(piece[: stop - end])
    return high - low


def _fill_window(target: Tensor, source: PieceSource, runs: Runs, scratch: Scratch) -> int:
    """Read one window through a buffer of its size."""
    start, stop = _extent(runs, source)
    low, high = source.checks.bounds(start, stop)
    data = scratch.bytes(high - low, pinned=target.is_cuda)
    source.read(low, data)
    first = low // source.dtype.itemsize
    here = Runs(target=runs.target, source=runs.source - first, length=runs.length)
    copy_runs(target, data.view(source.dtype).to(device=target.device, dtype=target.dtype), here)
    return high - low


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
    """[start, stop) of each group of runs with one length and one spacing on each side."""
    if len(runs) <= 2:
        return [(i, i + 1) for i in range(len(runs))]
    target_steps, source_steps = np.diff(runs.target), np.diff(runs.source)
    breaks = [0]
    # Step i leads from run i to i+1; a group of runs a..b needs equal lengths a..b and equal steps a..b-1.
    odd = (target_steps[1:] != target_steps[:-1]) | (source_steps[1:] != source_steps[:-1])
    cut_before = np.flatnonzero((runs.length[1:] != runs.length[:-1]) | np.append(odd, False)) + 1
    breaks += cut_before.tolist()
    return list(itertools.pairwise([*breaks, len(runs)]))
