"""Checksums by chunk: what lets a reader of a part prove that part.

One checksum over a whole piece would make every rank of another world size read all of it to prove its slice.  So
a piece is cut into chunks of one power of two, and has XXH3-64 of each.  A reader rounds what it wants out to whole
chunks; the chunk is at most 1/128 of the piece, so that costs little at any cut, between 4 KiB (below, hashing is all
overhead) and 1 MiB (above, a chunk no longer fits the cache in which it is hashed right after it was copied).

64 bits are plenty against accidents, and no checksum that is fast guards against a forger.
"""

from __future__ import annotations

from typing import final

import attrs
import numpy as np
import xxhash
from numpy.typing import NDArray

MIN_NBYTES = 4 << 10
MAX_NBYTES = 1 << 20
DIGITS = 16  # hex digits of one chunk
_SHARE = 128  # chunks that a piece has at least, between these limits


def chunk_nbytes(piece_nbytes: int) -> int:
    """The writer's choice for a piece of this size; readers take any."""
    share = max(piece_nbytes // _SHARE, 1)
    return min(max(1 << (share.bit_length() - 1), MIN_NBYTES), MAX_NBYTES)


def num_chunks(nbytes: int, chunk: int) -> int:
    return -(-nbytes // chunk)


def digests(data: memoryview, chunk: int) -> str:
    """Of each chunk of the bytes, joined: 16 lower-case hex digits each, most significant first."""
    return "".join(xxhash.xxh3_64_hexdigest(data[start : start + chunk]) for start in range(0, len(data), chunk))


class Unchecked:
    """Reads nothing more than what is wanted, and finds everything sound.  The base of the one that does not."""

    granule = 1  # bytes that are read together or not at all

    def bounds(self, start: int, stop: int) -> tuple[int, int]:
        """The bytes of the piece to read in order to prove [start, stop)."""
        return start, stop

    def is_sound(self, start: int, stop: int) -> bool:
        """Whether every chunk of [start, stop) was compared before."""
        return True

    def check(self, start: int, data: memoryview) -> None:
        """Compare the bytes that were read from `start`, which bounds() gave."""


@final
@attrs.define(eq=False)
class ChunkChecks(Unchecked):
    """The checksums of one piece, and which of its chunks are known to be sound.

    Threads may check at once: each chunk's fact goes from unknown to sound only.
    """

    nbytes: int  # of the piece
    granule: int  # the chunk
    joined: str  # checksums, 16 digits each
    sound: NDArray[np.bool_] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.sound = np.zeros(num_chunks(self.nbytes, self.granule), dtype=np.bool_)

    def bounds(self, start: int, stop: int) -> tuple[int, int]:
        first, last = start // self.granule, (stop - 1) // self.granule
        if not self.sound[first]:
            start = first * self.granule
        if not self.sound[last]:
            stop = min((last + 1) * self.granule, self.nbytes)
        return start, stop

    def is_sound(self, start: int, stop: int) -> bool:
        return bool(self.sound[start // self.granule : num_chunks(stop, self.granule)].all())

    def check(self, start: int, data: memoryview) -> None:
        """BadChunk if a chunk is not what was saved.  A chunk that is in `data` partly was sound before."""
        stop = start + len(data)
        for index in range(start // self.granule, num_chunks(stop, self.granule)):
            if self.sound[index]:
                continue
            begin, end = index * self.granule, min((index + 1) * self.granule, self.nbytes)
            found = xxhash.xxh3_64_hexdigest(data[begin - start : end - start])
            expected = self.joined[index * DIGITS : (index + 1) * DIGITS]
            if found != expected:
                raise BadChunk(begin, end, found, expected)
            self.sound[index] = True


class BadChunk(Exception):
    """Bytes [begin, end) of a piece hash to `found` and were `expected`; whoever knows the piece's name tells."""

    def __init__(self, begin: int, end: int, found: str, expected: str) -> None:
        super().__init__(f"bytes {begin:,} to {end:,}: checksum is {found}, expected {expected}")
        self.begin, self.end, self.found, self.expected = begin, end, found, expected
