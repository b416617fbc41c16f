from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from zpartition.disk import DiskFailed, DiskOptions, DiskStore

OPTIONS = DiskOptions(num_threads=2, chunk_bytes=4096, durable=False)


def test_waiting_ends_after_a_while_and_can_be_taken_up_again(folder: Path, faulty_disk: Any) -> None:
    go, disk = threading.Event(), faulty_disk()
    disk.fault = lambda call: go.wait(30) and None if call == "write" and disk.slow else None
    disk.slow = False
    with DiskStore.create(folder, OPTIONS, system=disk) as store:
        region = store.allocate("w", 9000)
        disk.slow = True
        transfer = store.write(region, torch.ones(9000, dtype=torch.uint8))
        with pytest.raises(TimeoutError, match=r"the write of region 'w' takes over 0\.01 s"):
            transfer.wait(0.01)
        assert not transfer.is_done
        go.set()
        transfer.wait()
        transfer.wait()
        assert transfer.is_done


def test_the_first_error_counts_and_no_transfer_keeps_memory(folder: Path, faulty_disk: Any, fail_once: Any) -> None:
    disk = faulty_disk()
    with DiskStore.create(folder, OPTIONS, system=disk) as store:
        region = store.allocate("w", 90_000)
        good = store.write(region, torch.ones(90_000, dtype=torch.uint8))
        good.wait()
        disk.fault = fail_once("read", number=3, times=100)
        calls = []
        bad = store.read(region, torch.ones(90_000, dtype=torch.uint8))
        for _ in range(2):
            with pytest.raises(DiskFailed, match="read region 'w'") as told:
                bad.wait()
            calls.append(told.value)
        assert calls[0] is calls[1]
        assert disk.fault.number > 3 - 22, "chunks after the first error are skipped"
        assert good.memory is bad.memory is None


def test_an_error_that_is_not_the_systems_reaches_the_waiter_and_the_thread_lives_on(
    folder: Path, faulty_disk: Any
) -> None:
    disk = faulty_disk()
    with DiskStore.create(folder, DiskOptions(num_threads=1), system=disk) as store:
        region = store.allocate("w", 10)

        def fault(call: str) -> None:
            raise MemoryError("no room for a bounce buffer")

        disk.fault = fault
        with pytest.raises(MemoryError, match="bounce"):
            store.write(region, torch.ones(10)).wait()
        disk.fault = lambda call: None
        store.write(region, torch.ones(10)).wait()
