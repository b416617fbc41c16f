from __future__ import annotations

from typing import Any

import pytest

from zpartition.disk import DiskError, DiskOptions, DiskStore, Region
from zpartition.disk.journal import NO_SLOT, RegionEntry
from zpartition.disk.region import Pending


@pytest.fixture
def region(model_disk: Any) -> Region:
    store = DiskStore.create("/model/rank-0", DiskOptions(chunk_bytes=4096), system=model_disk())
    return store.allocate("w", 5000)


def test_writes_go_to_the_slot_that_is_not_current_and_a_commit_swaps_the_roles(region: Region) -> None:
    assert region.slot_bytes == 8192
    assert region.entry() == RegionEntry("w", "zpartition-00000.region", 5000, NO_SLOT, ())
    for slot in (0, 1, 0):
        assert region.begin_write() == slot
        region.checksums[slot] = [3, 4]
        region.end_write(None)
        assert region.begin_write() == slot, "again, before the commit"
        region.checksums[slot] = [5, slot]
        region.end_write(None)
        assert region.begin_read() == slot
        entry = region.entry()
        assert entry.checksums == (5, slot)
        for _ in range(2):  # the same as once
            region.adopt(entry)
        assert (region.current, region.pending, region.begin_read()) == (slot, Pending.NONE, slot)


def test_a_torn_slot_is_neither_read_nor_committed(region: Region) -> None:
    with pytest.raises(DiskError, match="is empty"):
        region.begin_read()
    region.adopt(attrs_entry := RegionEntry("w", "zpartition-00000.region", 5000, 1, (1, 2)))
    region.begin_write()
    region.end_write(ValueError("of the drive"))
    with pytest.raises(DiskError, match=r"the last write of region 'w' failed \(of the drive\)"):
        region.begin_read()
    assert region.entry() == attrs_entry
    region.begin_write()
    region.end_write(None)
    assert region.begin_read() == 0
    region.mark_torn(ValueError("not synced"))
    assert region.pending is Pending.TORN
    region.reset()
    assert region.begin_read() == 1
