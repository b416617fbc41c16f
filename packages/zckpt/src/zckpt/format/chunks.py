"""Checksums by chunk, so that a reader of a part can verify that part.

With one checksum per piece, a rank at another world size would have to read the whole piece to verify its slice.  So
a piece is split into chunks of one power of two, each with its XXH3-64.  A reader rounds its range out to whole
chunks. A chunk is at most 1/128 of the piece, so the overhead is small at any sharding, between 4 KiB (below,
hashing is mostly overhead) and 1 MiB (above, a chunk no longer fits the cache in which it is hashed after the copy).

64 bits suffice against accidental corruption; no fast checksum protects against forgery.
"""

from __future__ import annotations

from typing import final

import attrs
import numpy as np
import xxhash
from numpy.typing import NDArray

MIN_NBYTES = 4 << 10
MAX_NBYTES = 1 << 20
DIGITS = 16  # hex digits per chunk
_SHARE = 128  # minimum number of chunks per piece, between these limits


def chunk_nbytes(piece_nbytes: int) -> int:
    """The writer's chunk size for a piece of this size; readers accept any."""
    share = max(piece_nbytes // _SHARE, 1)
    return min(max(1 << (share.bit_length() - 1), MIN_NBYTES), MAX_NBYTES)


def num_chunks(nbytes: int, chunk: int) -> int:
    return -(-nbytes // chunk)


def digests(data: memoryview, chunk: int) -> str:
    """Checksums of the chunks, joined: 16 lower-case hex digits each, most significant first."""
    if 0 < len(data) <= chunk:  # most tensors, if there are many
        return xxhash.xxh3_64_hexdigest(data)
    return "".join(xxhash.xxh3_64_hexdigest(data[start : start + chunk]) for start in range(0, len(data), chunk))


@final
class Hasher:
    """`digests` of data that comes in parts; every part but the last is a divisor or a multiple of the chunk."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.found: list[str] = []  # of whole chunks
        self.begun = xxhash.xxh3_64()  # of a chunk of which `held` bytes have come
        self.held = 0

    def update(self, data: memoryview) -> None:
        if not self.held and len(data) >= self.chunk:
            self.found.append(digests(data, self.chunk))
            return
        self.begun.update(data)
        self.held += len(data)
        if self.held == self.chunk:
            self._end_chunk()

    def digests(self) -> str:
        """The checksums of all data, joined."""
        if self.held:
            self._end_chunk()
        return "".join(self.found)

    def _end_chunk(self) -> None:
        self.found.append(self.begun.hexdigest())
        self.begun.reset()
        self.held = 0


class NoChecks:
    """Verification off: reads no more than requested and accepts every byte.  Base class of `ChunkChecks`."""

    granule = 1  # bytes; reads are aligned to it

    def bounds(self, start: int, stop: int) -> tuple[int, int]:
        """Byte range of the piece that must be read to verify [start, stop)."""
        return start, stop

    def is_verified(self, start: int, stop: int) -> bool:
        """True if every chunk of [start, stop) has been verified."""
        return True

    def check(self, start: int, data: memoryview) -> None:
        """Verify the bytes that were read from `start`, a value of `bounds`."""


@final
@attrs.define(eq=False)
class ChunkChecks(NoChecks):
    """Checksums of one piece, and which of its chunks are verified.

    Thread-safe: a chunk only ever goes from unverified to verified.
    """

    nbytes: int  # of the piece
    granule: int  # size of a chunk
    joined: str  # checksums, 16 digits each
    verified: NDArray[np.bool_] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.verified = np.zeros(num_chunks(self.nbytes, self.granule), dtype=np.bool_)

    def bounds(self, start: int, stop: int) -> tuple[int, int]:
        first, last = start // self.granule, (stop - 1) // self.granule
        if not self.verified[first]:
            start = first * self.granule
        if not self.verified[last]:
            stop = min((last + 1) * self.granule, self.nbytes)
        return start, stop

    def is_verified(self, start: int, stop: int) -> bool:
        return bool(self.verified[start // self.granule : num_chunks(stop, self.granule)].all())

    def check(self, start: int, data: memoryview) -> None:
        """Raises BadChunk if a checksum differs.  A chunk that `data` holds only in part has been verified before."""
        stop = start + len(data)
        for index in range(start // self.granule, num_chunks(stop, self.granule)):
            if self.verified[index]:
                continue
            begin, end = index * self.granule, min((index + 1) * self.granule, self.nbytes)
            found = xxhash.xxh3_64_hexdigest(data[begin - start : end - start])
            expected = self.joined[index * DIGITS : (index + 1) * DIGITS]
            if found != expected:
                raise BadChunk(begin, end, found, expected)
            self.verified[index] = True


class BadChunk(Exception):
    """Bytes [begin, end) of a piece have checksum `found` instead of `expected`; `Verifier` adds tensor and file."""

    def __init__(self, begin: int, end: int, found: str, expected: str) -> None:
        super().__init__(f"bytes {begin:,} to {end:,}: checksum is {found}, expected {expected}")
        self.begin, self.end, self.found, self.expected = begin, end, found, expected
