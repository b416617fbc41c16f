from __future__ import annotations

import json
import struct
import zlib

import pytest

from zpartition.disk.journal import NO_SLOT, Journal, RegionEntry, num_chunks

JOURNAL = Journal(
    generation=7,
    chunk_bytes=4096,
    entries=(
        RegionEntry("a", "zpartition-00000.region", 4097, 1, (1, 0xFFFFFFFF)),
        RegionEntry("layers.0/weight \n ü", "zpartition-00001.region", 10_000, NO_SLOT, ()),
        RegionEntry("nothing", "zpartition-00002.region", 0, 0, ()),
        RegionEntry("b", "zpartition-00003.region", 1, 0, (5,)),
    ),
)


def test_a_journal_comes_back() -> None:
    assert Journal.decode(JOURNAL.encode()) == JOURNAL
    assert Journal.decode(Journal(0, 4096, ()).encode()) == Journal(0, 4096, ())


def test_any_changed_or_missing_byte_is_told() -> None:
    data = JOURNAL.encode()
    for at in range(len(data)):
        for other in (data[:at], data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]):
            with pytest.raises(ValueError, match="expected checksum"):
                Journal.decode(other)


def test_a_journal_of_another_version_is_told() -> None:
    line, _, rest = JOURNAL.encode()[:-4].partition(b"\n")
    body = json.dumps({**json.loads(line), "format": 2}).encode() + b"\n" + rest
    with pytest.raises(ValueError, match="expected format 1, found 2: made by another version"):
        Journal.decode(body + struct.pack("<I", zlib.crc32(body)))


def test_the_last_chunk_may_be_short() -> None:
    assert [num_chunks(size, 4096) for size in (0, 1, 4096, 4097)] == [0, 1, 1, 2]
