"""Execution of a read plan: its items become jobs of a few threads; each file is opened once.

A job reads about 32 MiB of one piece for one wanted tensor, if the sharding allows, so that all threads share one
huge tensor; or many small tensors (small.py).  `fill` copies the bytes into the live tensors, `verify` only compares
their checksums.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
from zckpt.storage.safetensors_file import byte_view
from zckpt.storage.storage import Reader, Storage
from zckpt.storage.thread_pool import run_jobs

_JOB_NBYTES = 32 << 20
_THREAD_NBYTES = 8 << 20  # minimum bytes per thread
_OPEN_FILES = 128  # at once; a process may open 1,024, and a large run saves more files

_Act: TypeAlias = "Callable[[ReadItem, PieceSource, Runs], int]"  # returns the bytes read


@attrs.frozen
class _Pass:
    """What one pass over the bytes does."""

    act: _Act
    verify: bool  # compare checksums
    copy: bool  # fill the tensors


@final
@attrs.define(eq=False)
class ReadRunner:
    """Reads the items of a plan from one checkpoint."""

    folder: Path
    storage: Storage
    verifier: Verifier
    num_threads: int
    scratch: Scratch = attrs.field(factory=Scratch)
    once: bool = False  # each byte is read once, by this process only: bypass the page cache

    def fill(self, items: Sequence[ReadItem], verify: bool) -> int:
        """Fill the tensors of the items; return the bytes read.  Raises CheckpointCorrupt at the first bad chunk."""

        def act(item: ReadItem, source: PieceSource, runs: Runs) -> int:
            return fill(item.shard.tensor.detach(), source, [runs], self.scratch)

        return self._each(items, _Pass(act, verify, copy=True))

    def verify(self, items: Sequence[ReadItem]) -> int:
        """Read and verify the bytes that `fill` would read, without modifying a tensor; return the bytes read."""

        def act(item: ReadItem, source: PieceSource, runs: Runs) -> int:
            return verify_runs(source, [runs], self.scratch)

        return self._each(items, _Pass(act, verify=True, copy=False))

    def _each(self, items: Sequence[ReadItem], work: _Pass) -> int:
        nbytes = sum(item.region.numel * item.entry.dtype.itemsize for item in items)
        num_threads, read_nbytes = min(self.num_threads, 1 + nbytes // _THREAD_NBYTES), 0
        files = sorted({piece.file for item in items for piece in item.pieces})
        batches, others = find_batches(items)
        for start in range(0, len(files), _OPEN_FILES):
            with contextlib.ExitStack() as stack:
                readers: dict[str, Reader] = {}
                for file in files[start : start + _OPEN_FILES]:
                    readers[file] = stack.enter_context(self.storage.open(self.folder / file, once=self.once))
                    if work.verify:
                        self.verifier.check_header(readers[file], file)
                small = (
                    partial(self._batch, each, readers[each.file], work) for each in batches if each.file in readers
                )
                jobs = itertools.chain(self._jobs(others, readers, work), small)
                read_nbytes += sum(run_jobs(jobs, num_threads))
        return read_nbytes

    def _jobs(
        self, items: Sequence[ReadItem], readers: dict[str, Reader], work: _Pass
    ) -> Iterator[Callable[[], int]]:
        for item in items:
            for piece in item.pieces:
                if piece.file not in readers:
                    continue
                checks = self.verifier.checks(piece) if work.verify else NoChecks()
                source = PieceSource(readers[piece.file], piece.offset, item.entry.dtype, checks)
                for batch in intersect(item.region, piece.region):
                    for runs in _split_run(batch, _JOB_NBYTES // item.entry.dtype.itemsize):
                        yield partial(self._run, work.act, item, piece, source, runs)

    def _run(self, act: _Act, item: ReadItem, piece: Piece, source: PieceSource, runs: Runs) -> int:
        with self.verifier.locate_errors(piece):
            return act(item, source, runs)

    def _batch(self, batch: Batch, reader: Reader, work: _Pass) -> int:
        unverified = [piece for piece in batch.pieces if work.verify and not self.verifier.is_sound(piece)]
        if not unverified and not work.copy:
            return 0
        low, high = batch.extent
        data = self.scratch.bytes(high - low)
        view = byte_view(data)
        reader.read_into(low, view)
        for piece in unverified:
            self.verifier.check_small(piece, view[piece.offset - low : piece.offset - low + piece.nbytes])
        if work.copy:
            batch.fill(data)
        return sum(piece.nbytes for piece in batch.pieces)


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
