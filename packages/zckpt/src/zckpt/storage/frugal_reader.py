"""Reading of local files through the page cache, or past it where its pages cost more than they give.

Problem.  A fresh page of the cache is cheap (0.06 to 0.1 s of a core for a gigabyte) or expensive (0.3 to 1.0 s: a
kernel without large folios, or a virtual machine that gives its free pages back to the host).  Where it is expensive,
a load through the cache runs at a third of the disk's speed.

Design.  A reader measures.  It reads the first bytes through the cache without reading ahead, so that the processor
time is that of their pages.  Where they are cheap, the kernel reads ahead, and the cost is judged again from time to
time.  Where they are expensive, the reader uses O_DIRECT, in windows that span tensors (`Access.spans`), as neither
tensors nor their offsets in a file are aligned; what is cached by then still comes from the cache.

Bytes that are read twice (verify="first") fill the cache, whatever it costs: reading the disk twice took as long
where pages were expensive, and twice as long where they were not.

A cached range is read with RWF_NOWAIT.  That may start reading ahead, whatever the advice: each page that the kernel
marked starts it again, for the rest of the file.  It shows as cached bytes at the cost of fresh ones; then the next
ranges are not looked up in the cache.

Rejected: O_DIRECT always, which leaves nothing for a second load; direct reads while the kernel still reads ahead,
as each of them then reads bytes that the other reads, too; a choice for each machine, as the cost of a page changes
while a process runs.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import mmap
import os
import time
from bisect import bisect_right
from collections.abc import Iterator
from typing import final

import attrs
import numpy as np

from zckpt.storage.local_files import PlainReader, huge_pages, path_in_errors

WINDOW_NBYTES = 4 << 20  # of a direct read: a multiple of any file system's block
_CHEAP_S_PER_BYTE = 0.12e-9  # processor time for a byte of a cheap page
_AHEAD_NBYTES = 32 << 20  # the kernel has read ahead at most so far
_BLOCK_NBYTES = 4096
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)


@attrs.frozen
class Access:
    """How an open file will be read: hints, which change no byte."""

    is_once: bool = False  # this process reads each byte once, and no other process does
    spans: tuple[tuple[int, int], ...] = ()  # [start, stop) in order, each read from its start to its end


UNKNOWN = Access()


class Way(enum.Enum):
    """How the next bytes are read; a trial of some bytes ends each way but the last two."""

    PROBE = "through the cache without reading ahead: what does a page cost?"
    CACHE = "through the cache, as long as pages are cheap"
    DIRECT = "past the cache"
    SETTLED = "through the cache, whatever it costs"


TRIAL_NBYTES = {Way.PROBE: 2 << 20, Way.CACHE: 32 << 20}


@attrs.define
class _Trial:
    """What the reads of one way have taken."""

    nbytes: int = 0
    cpu_s: float = 0.0

    def costs_more(self, times: int) -> bool:
        """True if a byte took more than so many times the processor time of a cheap page."""
        return self.cpu_s > times * _CHEAP_S_PER_BYTE * self.nbytes

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        cpu_s = time.thread_time()
        yield
        self.cpu_s += time.thread_time() - cpu_s


@final
@attrs.define(eq=False)
class FrugalReader:
    """A storage.Reader for one thread; owns `plain`.

    Invariant: the first `held` bytes of `window` are those of the file from byte `start`.
    """

    plain: PlainReader
    fd: int  # of the same file, with O_DIRECT
    access: Access
    way: Way = Way.SETTLED
    trial: _Trial = attrs.field(factory=_Trial)  # of `way`
    cached: _Trial = attrs.field(factory=_Trial)  # of ranges found in the cache
    blind: int = 0  # bytes before this one are not looked up in the cache
    window: mmap.mmap | None = None  # aligned; allocated by the first direct read
    start: int = 0
    held: int = 0

    @classmethod
    def over(cls, plain: PlainReader, access: Access) -> FrugalReader | PlainReader:
        """A frugal reader of the same file, or `plain` where O_DIRECT is not supported."""
        try:
            fd = os.open(plain.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | _O_DIRECT)
        except OSError:
            return plain
        if not _O_DIRECT or not os.path.sameopenfile(fd, plain.fd):
            os.close(fd)
            return plain
        made = cls(plain, fd, access)
        made._continue(Way.PROBE)
        return made

    @property
    def nbytes(self) -> int:
        return self.plain.nbytes

    @property
    def step_nbytes(self) -> int:
        """A step of the cache; a window where each step is a read of the disk: past the cache, outside of spans."""
        return WINDOW_NBYTES if self.way is Way.DIRECT and not self.access.spans else self.plain.step_nbytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        rest = buffer.cast("B")
        while len(rest):
            count = self._copy_held(offset, rest) or self._copy_cached(offset, rest) or self._read(offset, rest)
            offset, rest = offset + count, rest[count:]

    def _read(self, offset: int, rest: memoryview) -> int:
        """Read the first of the bytes; return how many, or 0 if the window holds them now."""
        if self.way is Way.DIRECT:
            if self._read_window(offset, len(rest)):
                return 0
            self._continue(Way.SETTLED)  # the file system rejects direct reads, or the file ends: plain reads know
        with self.trial.measured():
            self.plain.read_into(offset, rest)
        self._count(len(rest))
        return len(rest)

    def _count(self, nbytes: int) -> None:
        """Count bytes that were read; at the end of a trial, choose how the next ones are."""
        self.trial.nbytes += nbytes
        if self.trial.nbytes < TRIAL_NBYTES.get(self.way, self.trial.nbytes + 1):
            return
        match self.way:
            case Way.PROBE:
                self._continue(Way.DIRECT if self.trial.costs_more(1) else Way.CACHE)
            case Way.CACHE:  # pages read ahead count, too
                self._continue(Way.DIRECT if self.trial.costs_more(3) else Way.CACHE)

    def _continue(self, way: Way) -> None:
        self.way, self.trial = way, _Trial()
        self.plain.read_ahead(way in (Way.CACHE, Way.SETTLED))

    def _copy_cached(self, offset: int, rest: memoryview) -> int:
        """Copy the first of the bytes that the page cache holds, where they are looked up; return how many."""
        if not _NOWAIT or offset < self.blind or self.way not in (Way.DIRECT, Way.PROBE):
            return 0
        try:
            os.preadv(self.plain.fd, [rest[:1]], offset, _NOWAIT)  # alone, as a miss reads what was asked for
            with self.cached.measured():
                count = os.preadv(self.plain.fd, [rest], offset, _NOWAIT)
        except OSError:  # EAGAIN: not in the cache; EOPNOTSUPP: unknown
            return 0
        self.cached.nbytes += count
        if self.cached.nbytes >= TRIAL_NBYTES[Way.PROBE]:
            if self.cached.costs_more(4):
                self.blind = offset + _AHEAD_NBYTES
            self.cached = _Trial()
        return count

    def _read_window(self, offset: int, nbytes: int) -> bool:
        """Read whole blocks from that of `offset` to the end of its span, as many as fit; False if none was read.

        Outside of spans, reads the blocks of [offset, offset + nbytes).
        """
        if self.window is None:
            self.window = huge_pages(WINDOW_NBYTES)
        self.start = offset // _BLOCK_NBYTES * _BLOCK_NBYTES
        stop = max(offset + nbytes, self._span_end(offset))
        room = memoryview(self.window)[: -(-(stop - self.start) // _BLOCK_NBYTES) * _BLOCK_NBYTES]
        try:
            with path_in_errors(self.plain.path):
                self.held = os.preadv(self.fd, [room], self.start)
        except OSError as error:
            self.held = 0
            if error.errno != errno.EINVAL:
                raise
        return self.start + self.held > offset

    def _span_end(self, offset: int) -> int:
        """The end of the span before or around this byte; 0 if there is none."""
        index = bisect_right(self.access.spans, (offset, self.nbytes)) - 1
        return self.access.spans[index][1] if index >= 0 else 0

    def _copy_held(self, offset: int, rest: memoryview) -> int:
        """Copy the first bytes of `rest` that the window holds; return how many."""
        skip = offset - self.start
        if self.window is None or not 0 <= skip < self.held:
            return 0
        held = np.frombuffer(self.window, np.uint8)[skip : self.held][: len(rest)]
        np.copyto(np.frombuffer(rest, np.uint8)[: len(held)], held)  # releases the GIL
        return len(held)

    def __enter__(self) -> FrugalReader:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.fd)
        self.plain.__exit__(*exc)
