from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from zpartition.disk import DiskClosed, DiskFailed, DiskOptions, DiskStore


def test_regions_travel_side_by_side_and_one_region_in_order(folder: Path, faulty_disk: Any) -> None:
    disk, meet, moved = faulty_disk(), threading.Barrier(2), []
    with DiskStore.create(folder, DiskOptions(num_threads=2, durable=False), system=disk) as store:
        a, b = store.allocate("a", 100), store.allocate("b", 100)

        def fault(call: str) -> None:
            if call == "write" and len(moved) < 2:
                moved.append(call)
                meet.wait(30)  # both threads are in a write: of two regions, as one region has one at a time

        disk.fault = fault
        for _ in range(2):
            store.write(a, torch.ones(100))
        store.write(b, torch.ones(100))
        store.resources.transfers.drain()
        assert store.commit() == 1
        assert not store.resources.transfers.in_flight


def test_a_long_line_of_transfers_that_fail_at_once_ends(folder: Path) -> None:
    with DiskStore.create(folder, DiskOptions(durable=False)) as store:
        region = store.allocate("never written", 10)
        transfers = [store.read(region, torch.ones(10)) for _ in range(3000)]
        store.resources.transfers.drain()
        assert all(each.is_done and each.error for each in transfers)
        assert store.resources.transfers.pop_unreported() is transfers[0].error
        assert store.resources.transfers.pop_unreported() is None, "told once"


def test_errors_are_told_once_and_not_when_they_were_waited_for(
    folder: Path, faulty_disk: Any, fail_once: Any
) -> None:
    disk = faulty_disk()
    with DiskStore.create(folder, DiskOptions(durable=False), system=disk) as store:
        region, transfers = store.allocate("w", 10), store.resources.transfers
        for told in (True, False):
            disk.fault = fail_once("write")
            transfer = store.write(region, torch.ones(10))
            transfers.drain()
            transfer.is_reported = told
            error = transfers.pop_unreported()
            assert error is None if told else isinstance(error, DiskFailed)
        disk.fault = fail_once("write")
        store.write(region, torch.ones(10))
        transfers.drain()
        transfers.drop_write_errors()
        assert transfers.pop_unreported() is None
        transfers.failed.append(transfer)
        transfer.is_reported, transfer.error = False, DiskClosed("closed", "path")
        assert transfers.pop_unreported() is None, "who closes a store knows"
        store.discard()
