from __future__ import annotations

import pytest

from zpartition.disk import Direct, DiskOptions


def test_options_are_checked_when_they_are_made() -> None:
    assert DiskOptions(direct="never").direct is Direct.NEVER
    for bad in (0, 1000, 4097, 2 << 30):
        with pytest.raises(ValueError, match=f"chunk_bytes is {bad:,}; it must be a multiple of 4,096"):
            DiskOptions(chunk_bytes=bad)
    with pytest.raises(ValueError, match="num_threads"):
        DiskOptions(num_threads=0)
    with pytest.raises(ValueError, match="'sometimes' is not a valid Direct"):
        DiskOptions(direct="sometimes")
