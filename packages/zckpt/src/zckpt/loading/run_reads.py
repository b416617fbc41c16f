"""Execution of a read plan by a few threads, each of which streams through a part of a file.

Problem.  A disk is fast, and the page cache reads ahead, where a file is read in order by few readers.  A thread that
jumps, and two threads that share a file descriptor, read half as fast: the kernel reads ahead what nobody wants.

Design.  Everything that is wanted of a file as it is stored is cut into stretches in the order of their offsets:
about 32 MiB of one tensor, or many small tensors (small.py).  Neighbouring stretches are a stream, one per thread and
of equal bytes, with a file descriptor of its own.  The elements of other boxes (another tensor-parallel degree) are
gathered run by run (copy.py), in jobs that are made on demand, as there may be millions of runs.  `fill` copies the
bytes into the live tensors, `verify` only compares their checksums.

Ranks of a host that read the same bytes share them through the page cache.  Where each rank reads its own, it tells
the storage how often, and what of a stream has no gaps: where fresh pages of the cache are expensive, it is bypassed,
in reads that span tensors (storage/frugal_reader.py).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import TypeAlias, final

import attrs
import numpy as np

from zckpt.format.chunks import NoChecks
from zckpt.format.manifest import Piece
from zckpt.format.regions import Runs, intersect
from zckpt.loading.copy import PieceSource, Scratch, fill, verify_runs
from zckpt.loading.plan_reads import ReadItem
from zckpt.loading.small import Batch, find_batches
from zckpt.loading.verify import Verifier
from zckpt.storage.frugal_reader import Access
from zckpt.storage.safetensors_file import byte_view
from zckpt.storage.storage import Reader, Storage
from zckpt.storage.thread_pool import run_jobs

_JOB_NBYTES = 32 << 20
_STRETCH_NBYTES = 4 << 20  # of one tensor: threads that read equal bytes end together
_RUN_NBYTES = 512  # a run of few elements takes as long as one of so many bytes
_GAP_NBYTES = 4 << 10  # largest gap in a span: a direct read is of whole blocks
_THREAD_NBYTES = 8 << 20  # minimum bytes per thread

_Work: TypeAlias = "Callable[[Reader], int]"  # reads some of a file; returns the bytes


@attrs.frozen
class _Stretch:
    """Bytes of a file that one call reads."""

    offset: int  # in the file
    nbytes: int
    work: _Work


class _Pass(enum.Enum):
    """What one pass over the bytes does."""

    VERIFY = "compare checksums"
    FILL = "fill the tensors"
    FILL_VERIFIED = "compare checksums, then fill the tensors"


@final
@attrs.define(eq=False)
class ReadRunner:
    """Reads the items of a plan from one checkpoint."""

    folder: Path
    storage: Storage
    verifier: Verifier
    num_threads: int
    scratch: Scratch = attrs.field(factory=Scratch)
    is_once: bool = False  # each byte is read once, and no other process reads it

    def fill(self, items: Sequence[ReadItem], verify: bool) -> int:
        """Fill the tensors of the items; return the bytes read.  Raises CheckpointCorrupt at the first bad chunk."""
        return self._each(items, _Pass.FILL_VERIFIED if verify else _Pass.FILL)

    def verify(self, items: Sequence[ReadItem]) -> int:
        """Read and verify the bytes that `fill` would read, without modifying a tensor; return the bytes read."""
        return self._each(items, _Pass.VERIFY)

    def _each(self, items: Sequence[ReadItem], work: _Pass) -> int:
        nbytes = sum(item.region.numel * item.entry.dtype.itemsize for item in items)
        num_threads = min(self.num_threads, 1 + nbytes // _THREAD_NBYTES)
        for file in sorted({piece.file for item in items for piece in item.pieces}) if work is not _Pass.FILL else ():
            if file not in self.verifier.headers:
                with self.storage.open(self.folder / file, access=self._access()) as reader:
                    self.verifier.check_header(reader, file)
        batches, others = find_batches(items)
        as_stored, scattered = _split_by_box(others)
        stretches: dict[str, list[_Stretch]] = {}
        for file, stretch in chain(self._small(batches, work), self._large(as_stored, work)):
            stretches.setdefault(file, []).append(stretch)
        streams = (
            partial(self._read, file, [each.work for each in stream], self._access(stream))
            for file, found in sorted(stretches.items())
            for stream in _streams(found, -(-nbytes // num_threads))
        )
        access = self._access()
        gathers = (partial(self._read, file, runs, access) for file, runs in self._gather(scattered, work))
        return sum(run_jobs(chain(streams, gathers), num_threads))

    def _read(self, file: str, work: Sequence[_Work], access: Access) -> int:
        with self.storage.open(self.folder / file, access=access) as reader:
            return sum(each(reader) for each in work)

    def _access(self, stream: Sequence[_Stretch] = ()) -> Access:
        """How `_read` will read."""
        return Access(self.is_once, _spans(stream) if self.is_once else ())

    def _small(self, batches: Sequence[Batch], work: _Pass) -> Iterator[tuple[str, _Stretch]]:
        for batch in batches:
            low, high = batch.extent
            yield batch.file, _Stretch(low, high - low, partial(self._batch, batch, work))

    def _large(self, found: Sequence[tuple[ReadItem, Piece]], work: _Pass) -> Iterator[tuple[str, _Stretch]]:
        for item, piece in found:
            itemsize = item.entry.dtype.itemsize
            for batch in intersect(item.region, piece.region):  # one run, as the boxes are equal
                for runs in _split_run(batch, _STRETCH_NBYTES // itemsize):
                    begin, nbytes = piece.offset + int(runs.source[0]) * itemsize, int(runs.length[0]) * itemsize
                    yield piece.file, _Stretch(begin, nbytes, partial(self._run, item, piece, runs, work))

    def _gather(self, found: Sequence[tuple[ReadItem, Piece]], work: _Pass) -> Iterator[tuple[str, list[_Work]]]:
        """Jobs of one file each, in the order of their offsets: opening a file may be a request over a network."""
        in_order = sorted(found, key=lambda pair: (pair[1].file, pair[1].offset))
        for file, pairs in groupby(in_order, key=lambda pair: pair[1].file):
            job: list[_Work] = []
            cost = 0
            for item, piece in pairs:
                itemsize = item.entry.dtype.itemsize
                for batch in intersect(item.region, piece.region):
                    for runs in _split_run(batch, _JOB_NBYTES // itemsize):
                        job.append(partial(self._run, item, piece, runs, work))
                        cost += int(runs.length.sum()) * itemsize + len(runs) * _RUN_NBYTES
                        if cost >= _JOB_NBYTES:
                            yield file, job
                            job, cost = [], 0
            if job:
                yield file, job

    def _run(self, item: ReadItem, piece: Piece, runs: Runs, work: _Pass, reader: Reader) -> int:
        checks = NoChecks() if work is _Pass.FILL else self.verifier.checks(piece)
        source = PieceSource(reader, piece.offset, item.entry.dtype, checks)
        with self.verifier.locate_errors(piece):
            if work is _Pass.VERIFY:
                return verify_runs(source, [runs], self.scratch)
            return fill(item.shard.tensor.detach(), source, [runs], self.scratch)

    def _batch(self, batch: Batch, work: _Pass, reader: Reader) -> int:
        unverified = [] if work is _Pass.FILL else [each for each in batch.pieces if not self.verifier.is_sound(each)]
        if not unverified and work is _Pass.VERIFY:
            return 0
        low, high = batch.extent
        data = self.scratch.bytes(high - low)
        view = byte_view(data)
        reader.read_into(low, view)
        for piece in unverified:
            self.verifier.check_small(piece, view[piece.offset - low : piece.offset - low + piece.nbytes])
        if work is not _Pass.VERIFY:
            batch.fill(data)
        return sum(piece.nbytes for piece in batch.pieces)


def _split_by_box(
    items: Sequence[ReadItem],
) -> tuple[list[tuple[ReadItem, Piece]], list[tuple[ReadItem, Piece]]]:
    """The pieces of the items that are wanted as one run, and those whose box differs from the wanted one."""
    as_stored: list[tuple[ReadItem, Piece]] = []
    scattered: list[tuple[ReadItem, Piece]] = []
    for item in items:
        for piece in item.pieces:
            (as_stored if item.region.box == piece.region.box else scattered).append((item, piece))
    return as_stored, scattered


def _streams(stretches: list[_Stretch], limit: int) -> Iterator[list[_Stretch]]:
    """The stretches of a file in order, in parts of about equal bytes, at most `limit` and half a stretch."""
    total = sum(each.nbytes for each in stretches) or 1  # of empty tensors: any part
    number = -(-total // max(limit, 1))
    parts: list[list[_Stretch]] = [[] for _ in range(number)]
    before = 0
    for each in sorted(stretches, key=lambda each: each.offset):
        parts[min((before + each.nbytes // 2) * number // total, number - 1)].append(each)  # where its middle lies
        before += each.nbytes
    return filter(None, parts)


def _spans(stream: Sequence[_Stretch]) -> tuple[tuple[int, int], ...]:
    """The bytes of the stretches, which are in order, joined over small gaps."""
    spans: list[tuple[int, int]] = []
    for each in stream:
        start, stop = spans.pop() if spans and each.offset - spans[-1][1] <= _GAP_NBYTES else (each.offset, 0)
        spans.append((start, max(stop, each.offset + each.nbytes)))
    return tuple(spans)


def _split_run(runs: Runs, limit: int) -> Iterator[Runs]:
    """Split a single long run at multiples of `limit` in the source; yield anything else unchanged."""
    if len(runs) != 1 or int(runs.length[0]) <= limit:
        yield runs
        return
    begin, target = int(runs.source[0]), int(runs.target[0])
    end, shift = begin + int(runs.length[0]), target - begin
    while begin < end:
        stop = min((begin // limit + 1) * limit, end)
        yield Runs(
            target=np.array([begin + shift], np.int64),
            source=np.array([begin], np.int64),
            length=np.array([stop - begin], np.int64),
        )
        begin = stop
