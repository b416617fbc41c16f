from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from zpartition.disk import DiskFailed, DiskOptions, DiskStore


def test_a_store_may_be_dropped_by_one_of_its_own_threads(folder: Path, faulty_disk: Any) -> None:
    """A garbage collection runs in whatever thread it likes; that one cannot wait for itself."""
    disk, dropped, kept = faulty_disk(), threading.Event(), []

    def fault(call: str) -> None:
        if call == "write" and kept:
            kept.clear()
            gc.collect()
            dropped.set()

    store = DiskStore.create(folder, DiskOptions(num_threads=2, durable=False), system=disk)
    region, threads = store.allocate("w", 10), store.resources.pool.threads
    disk.fault = fault
    ring: list[Any] = [store]
    ring.append(ring)  # so that only a collection finds it
    kept.append(ring)
    transfer = store.write(region, torch.ones(10))
    del store, ring
    assert dropped.wait(30)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert transfer.is_done
    DiskStore.open(folder).close()


def test_what_goes_wrong_while_giving_back_is_told_by_close_and_the_folder_is_free(
    folder: Path, monkeypatch: pytest.MonkeyPatch, faulty_disk: Any
) -> None:
    disk = faulty_disk()
    store = DiskStore.create(folder, DiskOptions(), system=disk)
    store.allocate("w", 10)

    def remove(path: str) -> None:
        raise PermissionError(1, "no", path)

    monkeypatch.setattr(disk, "remove", remove, raising=False)
    with pytest.raises(DiskFailed, match="remove the store"):
        store.close(remove=True)
    monkeypatch.undo()
    DiskStore.open(folder).close(remove=True)
    assert not folder.exists()


def test_an_error_of_the_body_is_not_covered_by_one_of_closing(
    folder: Path, faulty_disk: Any, fail_once: Any
) -> None:
    disk = faulty_disk()

    def body() -> None:
        with DiskStore.create(folder, DiskOptions(durable=False), system=disk) as store:
            region = store.allocate("w", 10)
            disk.fault = fail_once("write")
            store.write(region, torch.ones(10))
            store.resources.transfers.drain()
            raise KeyError("of the body")

    with pytest.raises(KeyError, match="of the body"):
        body()
