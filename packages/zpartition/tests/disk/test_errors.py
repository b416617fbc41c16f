from __future__ import annotations

import errno

from zpartition.disk import DiskCorrupt, DiskError, DiskFailed, DiskFull, DiskMissing


def test_errors_say_where_and_what_and_what_to_do() -> None:
    corrupt = DiskCorrupt("/d/f", "moments", 1 << 20, "checksum 1", "checksum 2")
    assert str(corrupt) == (
        "/d/f: region 'moments' is corrupt in the chunk at byte 1,048,576: expected checksum 1, found checksum 2. "
        "Its values are lost; load a checkpoint"
    )
    failed = DiskFailed("write region 'w'", "/d/f", errno.EIO, 4096)
    assert "could not write region 'w' (4,096 bytes): Input/output error (errno 5)" in str(failed)
    full = DiskFull("allocate region 'w'", "/d/f", errno.ENOSPC, 5000, 100)
    assert "5,000 bytes are needed and 100 are free" in str(full)
    assert (full.errno, full.needed_bytes, full.free_bytes) == (errno.ENOSPC, 5000, 100)
    for error in (corrupt, failed, full):
        assert isinstance(error, DiskError)
        assert error.path == "/d/f"
    assert issubclass(DiskFull, DiskFailed)
    assert issubclass(DiskMissing, LookupError)
