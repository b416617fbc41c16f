from __future__ import annotations

import errno
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from zpartition.disk import (
    DiskBusy,
    DiskClosed,
    DiskError,
    DiskExists,
    DiskFailed,
    DiskFull,
    DiskMissing,
    DiskOptions,
    DiskStore,
)

SMALL = DiskOptions(num_threads=2, chunk_bytes=4096, durable=False)
SIZES = [0, 1, 4095, 4096, 4097, 8192, 40_961]


def noise(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, (num_bytes,), generator=torch.Generator().manual_seed(seed + num_bytes), dtype=torch.uint8
    )


def read(store: DiskStore, name: str) -> torch.Tensor:
    into = torch.zeros(store.regions[name].num_bytes, dtype=torch.uint8)
    store.read(store.regions[name], into).wait()
    return into


@pytest.mark.parametrize("direct", ["auto", "never"])
def test_values_of_any_size_come_back_from_any_memory_and_after_a_reopening(folder: Path, direct: str) -> None:
    options = DiskOptions(num_threads=3, chunk_bytes=8192, direct=direct)
    with DiskStore.create(folder, options) as store:
        for size in SIZES:
            region, buffer = store.allocate(f"own memory {size}", size), store.buffer(size)
            assert buffer.data_ptr() % 4096 == 0
            assert buffer.numel() >= size
            buffer[:size] = noise(size)
            store.write(region, buffer)
            store.write(
                store.allocate(f"odd address {size}", size), torch.cat([torch.zeros(1).byte(), noise(size)])[1:]
            )
        assert store.commit() == 1
        assert store.commit() == 1, "nothing was written since"
    with DiskStore.open(folder, DiskOptions(num_threads=1)) as store:
        assert store.options.chunk_bytes == 8192, "that of the files"
        assert len(store.regions) == 2 * len(SIZES)
        for name, region in store.regions.items():
            assert torch.equal(read(store, name), noise(region.num_bytes)), name
            larger = torch.full((region.num_bytes + 3,), 7, dtype=torch.uint8)
            store.read(region, larger).wait()
            assert larger[region.num_bytes :].tolist() == [7, 7, 7], "nothing behind the region is touched"


def test_tensors_of_any_dtype_and_shape_are_bytes(folder: Path) -> None:
    with DiskStore.create(folder, SMALL) as store:
        region = store.allocate("w", 7 * 13 * 2)
        source = torch.randn(7, 13).bfloat16()
        store.write(region, source)
        into = torch.empty(13, 7, dtype=torch.bfloat16)
        store.read(region, into).wait()
        assert torch.equal(into.view(7, 13), source)
        for bad in (torch.empty(90, 2, dtype=torch.uint8), torch.empty(200, 2).T, torch.empty(200, device="meta")):
            with pytest.raises(ValueError, match="contiguous CPU tensor of at least"):
                store.write(region, bad)


def test_a_read_sees_the_newest_write_and_discard_returns_to_the_commit(folder: Path) -> None:
    with DiskStore.create(folder, SMALL) as store:
        region = store.allocate("w", 100_000)
        with pytest.raises(DiskError, match="region 'w' is empty"):
            store.read(region, store.buffer(100_000)).wait()
        store.write(region, noise(100_000, 1))
        store.commit()
        into = [torch.empty(100_000, dtype=torch.uint8) for _ in range(3)]
        sources = [noise(100_000, seed) for seed in (2, 3)]
        transfers = [
            store.read(region, into[0]), store.write(region, sources[0]), store.read(region, into[1]),
            store.write(region, sources[1]), store.read(region, into[2]),
        ]  # fmt: skip
        for transfer in transfers:
            transfer.wait()
            assert transfer.is_done
        for tensor, seed in zip(into, (1, 2, 3)):
            assert torch.equal(tensor, noise(100_000, seed)), "in the order in which they were asked for"
        store.discard()
        assert torch.equal(read(store, "w"), noise(100_000, 1))
        assert store.commit() == 1


def test_a_folder_belongs_to_one_store_and_what_a_process_left_is_opened_or_removed(folder: Path) -> None:
    with pytest.raises(DiskMissing, match="there is no store"):
        DiskStore.open(folder)
    DiskStore.remove(folder)  # nothing there is fine
    store = DiskStore.create(folder, SMALL)
    for opening in (DiskStore.create, DiskStore.open, DiskStore.remove):
        with pytest.raises(DiskBusy, match=rf"in use by process {os.getpid()} on"):
            opening(folder)
    store.write(store.allocate("w", 5), noise(5))
    store.commit()
    store.allocate("never committed", 5)
    store.close()
    with pytest.raises(DiskExists, match=r"DiskStore\.open\(\) to"):
        DiskStore.create(folder)
    (folder / "zpartition.journal.new").write_text("of a crash")
    with DiskStore.open(folder, SMALL) as store:
        assert list(store.regions) == ["w"]
        assert len(list(folder.iterdir())) == 3, "what the crash left is gone"
    (folder / "somebody's").write_text("keep")
    DiskStore.remove(folder)
    assert [path.name for path in folder.iterdir()] == ["somebody's"]


def test_what_cannot_be_is_rejected_by_name(folder: Path) -> None:
    store = DiskStore.create(folder, SMALL)
    region = store.allocate("w", 5)
    with pytest.raises(ValueError, match="region 'w' exists"):
        store.allocate("w", 7)
    with pytest.raises(ValueError, match="-1 bytes"):
        store.allocate("v", -1)
    with (
        DiskStore.create(folder.with_name("rank-1"), SMALL) as other,
        pytest.raises(ValueError, match="belongs to another store"),
    ):
        other.write(region, noise(5))
    store.close(remove=True)
    assert not folder.exists()
    store.close()
    for use in (lambda: store.write(region, noise(5)), lambda: store.read(region, noise(5)), store.commit):
        with pytest.raises(DiskClosed, match="the store is closed"):
            use()


def test_a_full_disk_is_told_at_allocation_with_what_is_needed_and_free(
    folder: Path, faulty_disk: Any, fail_once: Any
) -> None:
    with DiskStore.create(folder, SMALL, system=faulty_disk()) as store:
        files = set(folder.iterdir())
        with pytest.raises(DiskFull, match="make room") as told:
            store.allocate("w", 1 << 60)
        assert told.value.needed_bytes == 2 << 60
        assert 0 < told.value.free_bytes < 1 << 60
        store.resources.folder.system.fault = fail_once("allocate", errno.ENOSPC)
        with pytest.raises(DiskFull, match="region 'w'"):
            store.allocate("w", 100)
        assert set(folder.iterdir()) == files, "nothing is left of it"
        store.write(store.allocate("w", 100), noise(100)).wait()


def test_a_write_that_fails_is_told_and_the_commit_before_it_stands(
    folder: Path, faulty_disk: Any, fail_once: Any
) -> None:
    disk = faulty_disk()
    with DiskStore.create(folder, SMALL, system=disk) as store:
        region = store.allocate("w", 50_000)
        store.write(region, noise(50_000, 1))
        store.commit()
        disk.fault = fail_once("write", errno.ENOSPC, number=5, times=99)
        transfer = store.write(region, noise(50_000, 2))
        with pytest.raises(DiskFull, match="write region 'w'"):
            transfer.wait()
        disk.fault = lambda call: None
        with pytest.raises(DiskFull):
            store.commit()  # the region is torn, though the error was heard
        with pytest.raises(DiskError, match="the last write of region 'w' failed"):
            read(store, "w")
        store.write(region, noise(50_000, 3))
        assert store.commit() == 2
        assert torch.equal(read(store, "w"), noise(50_000, 3))
        disk.fault = fail_once("write", errno.EIO)
        store.write(region, noise(50_000, 4))
        store.discard()
        assert torch.equal(read(store, "w"), noise(50_000, 3))
        assert store.commit() == 2


def test_errors_that_nobody_waited_for_are_told_at_commit_or_close(
    folder: Path, faulty_disk: Any, fail_once: Any
) -> None:
    disk = faulty_disk()
    store = DiskStore.create(folder, SMALL, system=disk)
    region = store.allocate("w", 50_000)
    store.write(region, noise(50_000))
    store.commit()
    disk.fault = fail_once("read")
    store.read(region, noise(50_000))
    with pytest.raises(DiskFailed, match=r"read region 'w'.*errno 5"):
        store.commit()
    store.commit()  # once is enough
    disk.fault = fail_once("write")
    store.write(region, noise(50_000))
    store.resources.transfers.drain()
    with pytest.raises(DiskFailed, match="write region 'w'"):
        store.close()
    assert not [thread for thread in threading.enumerate() if "zpartition-disk" in thread.name]


@pytest.mark.parametrize(("call", "number"), [("sync_data", 0), ("sync_data", 1), ("open", 0), ("write", 0)])
def test_a_commit_that_fails_before_the_rename_can_be_mended(
    folder: Path, faulty_disk: Any, fail_once: Any, call: str, number: int
) -> None:
    disk = faulty_disk()
    with DiskStore.create(folder, DiskOptions(chunk_bytes=4096), system=disk) as store:
        region = store.allocate("w", 50_000)
        store.write(region, noise(50_000, 1))
        store.commit()
        store.write(region, noise(50_000, 2)).wait()
        disk.fault = fail_once(call, errno.EIO, number)
        with pytest.raises(DiskFailed):
            store.commit()
        assert store.generation == 1
        if (call, number) == ("sync_data", 0):  # the bytes may be lost: they have to be written again
            with pytest.raises(DiskError):
                store.commit()
            store.write(region, noise(50_000, 2))
        assert store.commit() == 2
        assert torch.equal(read(store, "w"), noise(50_000, 2))


@pytest.mark.parametrize("call", ["rename", "sync_folder"])
def test_a_commit_in_doubt_is_settled_before_anything_is_written(
    folder: Path, faulty_disk: Any, fail_once: Any, call: str
) -> None:
    disk = faulty_disk()
    with DiskStore.create(folder, DiskOptions(), system=disk) as store:
        region = store.allocate("w", 5000)
        store.write(region, noise(5000, 1))
        store.commit()
        store.write(region, noise(5000, 2))
        disk.fault = fail_once(call)
        with pytest.raises(DiskFailed, match="commit generation 2"):
            store.commit()
        disk.fault = fail_once("sync_folder")
        with pytest.raises(DiskFailed, match="find out what is committed"):
            store.write(region, noise(5000, 3))
        if call == "sync_folder":  # the rename was done
            assert store.commit() == 2
            assert store.generation == 2
        store.discard()
        assert torch.equal(read(store, "w"), noise(5000, 1 if call == "rename" else 2))


def test_close_cuts_off_what_is_under_way(folder: Path, faulty_disk: Any) -> None:
    go, began = threading.Event(), threading.Event()
    disk = faulty_disk()
    store = DiskStore.create(folder, DiskOptions(num_threads=1, chunk_bytes=4096), system=disk)
    regions = [store.allocate(name, 20_000) for name in "ab"]

    def fault(call: str) -> None:
        if call == "write":
            began.set()
            assert go.wait(30)

    disk.fault = fault
    transfers = [store.write(region, noise(20_000)) for region in (regions[0], regions[0], regions[1])]
    assert began.wait(30)
    closing = threading.Thread(target=store.close)
    closing.start()
    while transfers[2].error is None:
        pass
    go.set()
    closing.join()
    for transfer in transfers:
        with pytest.raises(DiskClosed, match="closed before the write of region"):
            transfer.wait()


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_fifty_stores_leave_no_thread_and_no_file(folder: Path) -> None:
    threads, files = threading.active_count(), num_files()
    for number in range(50):
        store = DiskStore.create(folder, SMALL)
        store.write(store.allocate("w", 10_000), noise(10_000))
        if number % 2:
            store.close(remove=True)
        else:  # dropped with a write under way
            gone = weakref.ref(store)
            del store
            assert gone() is None
            DiskStore.remove(folder)
    assert (threading.active_count(), num_files()) == (threads, files)
    assert not folder.exists()


def test_a_store_that_cannot_be_opened_holds_nothing(folder: Path, faulty_disk: Any, fail_once: Any) -> None:
    DiskStore.create(folder, SMALL).close()
    threads, files = threading.active_count(), num_files()
    with pytest.raises(DiskFailed, match="open the store"):
        DiskStore.open(folder, system=faulty_disk(fail_once("read")))
    with pytest.raises(DiskFailed, match="make the store's folder"):
        DiskStore.create("/dev/null/rank-0")
    with pytest.raises(DiskFailed, match="lock the store"):
        DiskStore.create("/proc/self")
    assert (threading.active_count(), num_files()) == (threads, files)
    DiskStore.open(folder).close()


def test_a_forked_process_is_told_whose_store_it_is_and_takes_nothing_away(folder: Path) -> None:
    with DiskStore.create(folder, SMALL) as store:
        region = store.allocate("w", 10)
        child = os.fork()
        if child == 0:  # pragma: no cover
            status = 1
            try:
                store.write(region, noise(10))
            except DiskClosed as error:
                status = 0 if "is a fork" in str(error) else 2
            store.close(remove=True)
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        store.write(region, noise(10)).wait()
        with pytest.raises(DiskBusy):
            DiskStore.open(folder)
