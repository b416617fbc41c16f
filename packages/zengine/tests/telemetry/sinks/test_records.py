"""Records and their checksums."""

import io
import random
import struct

import pytest
from tensorboard.summary.writer import record_writer

from zengine.telemetry.sinks.records import RecordWriter, crc32c, masked


@pytest.mark.parametrize(
    ("data", "checksum"),
    [
        (b"", 0x00000000),
        (b"123456789", 0xE3069283),  # the check value of the algorithm
        (b"a", 0xC1D04330),
        (bytes(32), 0x8A9136AA),  # RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_the_checksum_has_its_published_values(data, checksum):
    assert crc32c(data) == checksum


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 1023, 1024, 1025, 1026, 1027, 1028, 5000])
def test_files_are_those_of_tensorboards_own_writer(size):
    data = random.Random(size).randbytes(size)
    assert masked(crc32c(data)) == record_writer.masked_crc32c(data)
    ours, theirs = io.BytesIO(), io.BytesIO()
    RecordWriter(ours).write(data)
    record_writer.RecordWriter(theirs).write(data)
    assert ours.getvalue() == theirs.getvalue()
    assert struct.unpack("<Q", ours.getvalue()[:8]) == (size,)


def test_closing_closes_the_file():
    file = io.BytesIO()
    writer = RecordWriter(file)
    writer.flush()
    writer.close()
    assert file.closed
