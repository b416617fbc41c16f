"""A changed byte anywhere on disk is detected, with its region and offset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from zpartition.disk import DiskCorrupt, DiskFailed, DiskOptions, DiskStore

SIZE = 6000
OPTIONS = DiskOptions(num_threads=1, chunk_bytes=4096, direct="never", durable=False)


@pytest.fixture
def left(folder: Path) -> Path:
    """A store with one region, committed twice: slot 1 is current."""
    with DiskStore.create(folder, OPTIONS) as store:
        region = store.allocate("moments", SIZE)
        for generation in (1, 2):
            store.write(region, torch.full((SIZE,), generation, dtype=torch.uint8)).wait()
            store.commit()
    return folder


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([old ^ 1]))


def test_any_byte_of_a_region(left: Path) -> None:
    path = left / "zpartition-00000.region"
    with DiskStore.open(left, OPTIONS) as store:
        region, into = store.regions["moments"], store.buffer(SIZE)
        for offset in [*range(0, SIZE, 397), 4095, 4096, SIZE - 1]:
            flip(path, 8192 + offset)
            with pytest.raises(DiskCorrupt, match="region 'moments' is corrupt") as told:
                store.read(region, into).wait()
            assert told.value.path == str(path)
            assert told.value.offset == offset // 4096 * 4096
            assert told.value.expected != told.value.found
            flip(path, 8192 + offset)
            store.read(region, into).wait()
        flip(path, 17)  # the other slot
        flip(path, 8192 + SIZE)  # the padding
        store.read(region, into).wait()
        assert (into[:SIZE] == 2).all()


def test_any_byte_of_the_journal(left: Path) -> None:
    journal = left / "zpartition.journal"
    for offset in range(journal.stat().st_size):
        flip(journal, offset)
        with pytest.raises(DiskCorrupt, match="a whole journal"):
            DiskStore.open(left, OPTIONS)
        flip(journal, offset)
    DiskStore.open(left, OPTIONS).close()


@pytest.mark.parametrize("length", [0, 3, 60])
def test_a_journal_that_was_cut(left: Path, length: int) -> None:
    journal = left / "zpartition.journal"
    journal.write_bytes(journal.read_bytes()[:length])
    with pytest.raises(DiskCorrupt):
        DiskStore.open(left, OPTIONS)
    DiskStore.remove(left)


def test_a_file_that_is_short_or_gone(left: Path) -> None:
    path = left / "zpartition-00000.region"
    with DiskStore.open(left, OPTIONS) as store:
        content = path.read_bytes()
        with path.open("r+b") as file:
            file.truncate(8192 + 5000)
        with pytest.raises(DiskCorrupt, match="the end of the file after 904 bytes"):  # right values in memory or not
            store.read(store.regions["moments"], store.buffer(SIZE).fill_(2)).wait()
    with pytest.raises(DiskCorrupt, match="found one of 13,192"):
        DiskStore.open(left, OPTIONS)
    path.unlink()
    with pytest.raises(DiskCorrupt, match="found none"):
        DiskStore.open(left, OPTIONS)
    path.write_bytes(content)
    DiskStore.open(left, OPTIONS).close()


def test_a_tensor_that_changes_while_it_is_written(folder: Path, faulty_disk: Any) -> None:
    disk = faulty_disk()
    with DiskStore.create(folder, OPTIONS, system=disk) as store:
        region, source = store.allocate("w", SIZE), torch.zeros(SIZE, dtype=torch.uint8)
        disk.fault = lambda call: source.__setitem__(5, 1) if call == "write" else None
        store.write(region, source).wait()
        with pytest.raises(DiskCorrupt):
            store.read(region, store.buffer(SIZE)).wait()


def test_a_drive_that_does_not_answer(left: Path) -> None:
    with DiskStore.open(left, OPTIONS) as store:
        region = store.regions["moments"]
        region.file.close()
        with pytest.raises(DiskFailed, match="errno 9") as told:
            store.read(region, store.buffer(SIZE)).wait()
        assert told.value.num_bytes == 4096
