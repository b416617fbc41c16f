r"""Journal: the committed state of a store as a value, and its file format.

    {"format": 1, "generation": 7, "chunk_bytes": 1048576, "regions": [...]}\n    JSON, one line
    checksums of the regions' current slots, concatenated                         uint32, little-endian
    checksum of everything above                                                  uint32, little-endian

A region is `{"name", "file", "num_bytes", "slot"}`; slot -1 means allocated and never written.  Each commit rewrites
the whole journal: 4 bytes for each chunk, a quarter of a megabyte for 64 GiB.  Rejected: an append-only log, which a
crash can tear and which needs compaction.
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import attrs

FORMAT = 1
NO_SLOT = -1


def num_chunks(num_bytes: int, chunk_bytes: int) -> int:
    """Return the number of chunks; the last one may be shorter."""
    return -(-num_bytes // chunk_bytes)


@attrs.frozen
class RegionEntry:
    """One committed region."""

    name: str
    file: str  # in the store's folder
    num_bytes: int  # of the region; a slot is that, padded
    slot: int  # 0, 1, or NO_SLOT
    checksums: tuple[int, ...]  # crc32 of each chunk of the slot; () without one


@attrs.frozen
class Journal:
    """Everything that a store knows after a crash."""

    generation: int
    chunk_bytes: int
    entries: tuple[RegionEntry, ...]

    def encode(self) -> bytes:
        """Serialize to the file format of this module."""
        regions = [attrs.asdict(each, filter=attrs.filters.exclude("checksums")) for each in self.entries]
        head = {
            "format": FORMAT,
            "generation": self.generation,
            "chunk_bytes": self.chunk_bytes,
            "regions": regions,
        }
        sums = [number for each in self.entries for number in each.checksums]
        body = json.dumps(head).encode() + b"\n" + struct.pack(f"<{len(sums)}I", *sums)
        return body + struct.pack("<I", zlib.crc32(body))

    @classmethod
    def decode(cls, data: bytes) -> Journal:
        """Parse `data`.  Raises ValueError, with expected and found values, for data that `encode` did not make."""
        body, tail = data[:-4], data[-4:]
        found = zlib.crc32(body)
        if len(tail) < 4 or struct.unpack("<I", tail)[0] != found:
            expected = f"{struct.unpack('<I', tail)[0]:08x}" if len(tail) == 4 else "at least 4 bytes"
            raise ValueError(f"expected checksum {expected}, found {found:08x}")
        line, _, packed = body.partition(b"\n")
        head = json.loads(line)
        if head["format"] != FORMAT:
            raise ValueError(f"expected format {FORMAT}, found {head['format']}: made by another version")
        return cls(head["generation"], head["chunk_bytes"], _entries(head, packed))


def _entries(head: dict[str, Any], packed: bytes) -> tuple[RegionEntry, ...]:
    sums = [number for (number,) in struct.iter_unpack("<I", packed)]
    made, start = [], 0
    for each in head["regions"]:
        count = num_chunks(each["num_bytes"], head["chunk_bytes"]) if each["slot"] != NO_SLOT else 0
        made.append(RegionEntry(**each, checksums=tuple(sums[start : start + count])))
        start += count
    return tuple(made)
