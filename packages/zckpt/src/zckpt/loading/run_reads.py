"""Carrying out a plan to read: its items as jobs for a few threads, each file opened once.

A job is a stretch of one piece for one wanted tensor, of some 32 MiB where the cut allows it, so that one huge tensor
is the work of all threads.  What is done with a stretch is one of two things: `fill` puts it into the live tensor,
`prove` only compares it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias, final

import attrs
import numpy as np

from zckpt.format.chunks import NoChecks
from zckpt.format.manifest import Piece
from zckpt.format.regions import Runs, intersect
from zckpt.loading.copy import PieceSource, Scratch, fill, prove
from zckpt.loading.plan_reads import ReadItem
from zckpt.loading.verify import Verifier
from zckpt.storage.storage import Reader, Storage
from zckpt.storage.thread_pool import run_jobs

_JOB_NBYTES = 32 << 20
_THREAD_NBYTES = 8 << 20  # the least that is worth a thread of its own
_OPEN_FILES = 128  # at once; a process may have 1,024, and a large run saves more than that

_Act: TypeAlias = "Callable[[ReadItem, PieceSource, Runs], int]"  # returns the bytes read


@final
@attrs.define(eq=False)
class ReadRunner:
    """The reading side of one checkpoint."""

    folder: Path
    storage: Storage
    verifier: Verifier
    num_threads: int
    scratch: Scratch = attrs.field(factory=Scratch)
    once: bool = False  # what is read is wanted once, and by no other process

    def fill(self, items: Sequence[ReadItem], verify: bool) -> int:
        """Fill the items' tensors; returns the bytes read.  CheckpointCorrupt at the first that is not sound."""
        return self._each(
            items, lambda item, source, runs: fill(item.shard.tensor.detach(), source, [runs], self.scratch), verify
        )

    def prove(self, items: Sequence[ReadItem]) -> int:
        """Read what `fill` would, and touch no tensor."""
        return self._each(items, lambda item, source, runs: prove(source, [runs], self.scratch), True)

    def _each(self, items: Sequence[ReadItem], act: _Act, verify: bool) -> int:
        nbytes = sum(item.region.numel * item.entry.dtype.itemsize for item in items)
        num_threads, read_nbytes = min(self.num_threads, 1 + nbytes // _THREAD_NBYTES), 0
        files = sorted({piece.file for item in items for piece in item.pieces})
        for start in range(0, len(files), _OPEN_FILES):
            with contextlib.ExitStack() as stack:
                readers: dict[str, Reader] = {}
                for file in files[start : start + _OPEN_FILES]:
                    readers[file] = stack.enter_context(self.storage.open(self.folder / file, once=self.once))
                    if verify:
                        self.verifier.check_header(readers[file], file)
                read_nbytes += sum(run_jobs(self._jobs(items, readers, act, verify), num_threads))
        return read_nbytes

    def _jobs(
        self, items: Sequence[ReadItem], readers: dict[str, Reader], act: _Act, verify: bool
    ) -> Iterator[Callable[[], int]]:
        for item in items:
            for piece in item.pieces:
                if piece.file not in readers:
                    continue
                checks = self.verifier.checks(piece) if verify else NoChecks()
                source = PieceSource(readers[piece.file], piece.offset, item.entry.dtype, checks)
                for batch in intersect(item.region, piece.region):
                    for runs in _stretches(batch, _JOB_NBYTES // item.entry.dtype.itemsize):
                        yield partial(self._run, act, item, piece, source, runs)

    def _run(self, act: _Act, item: ReadItem, piece: Piece, source: PieceSource, runs: Runs) -> int:
        with self.verifier.named_errors(piece):
            return act(item, source, runs)


def _stretches(runs: Runs, limit: int) -> Iterator[Runs]:
    """One long run as several, cut at multiples of `limit` in the source; anything else as it is."""
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
