"""A disk in memory on which the power can be cut after any call, and a real one whose calls can be made to fail.

What POSIX promises after a power cut is little: the bytes of a file that were synced, and the names of a folder that
was synced.  Everything else is there or is not, block by block and name by name.  So `ModelDisk` keeps, for each file
and for the folder, what was synced and what was done since.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from zpartition.disk.memory import ALIGNMENT
from zpartition.disk.system import DIRECT, System

LOCK = "zpartition.lock"


class PowerCut(Exception):
    """The machine is off; nothing is done any more."""


@attrs.define(eq=False)
class Inode:
    data: bytearray = attrs.field(factory=bytearray)
    synced: bytes = b""
    since: list[tuple[int, bytes]] = attrs.field(factory=list)  # writes since the sync

    def survived(self, keep: Callable[[], bool]) -> Inode:
        """Each block of each write is there or not."""
        data = bytearray(self.synced)
        for offset, written in self.since:
            for start in range(0, len(written), ALIGNMENT):
                block = written[start : start + ALIGNMENT]
                if keep():
                    data.extend(bytes(max(0, offset + start + len(block) - len(data))))
                    data[offset + start : offset + start + len(block)] = block
        return Inode(data, bytes(data))


class ModelDisk(System):
    """One folder of files in memory; after `calls_left` more calls that change something the power is cut."""

    def __init__(self, calls_left: float = float("inf")) -> None:
        self.calls_left = calls_left
        self.num_calls = 0
        self.files: dict[str, Inode] = {}
        self.synced_names: dict[str, Inode] = {}
        self.open_files: dict[int, tuple[Inode, bool]] = {}

    def survived(self, keep: Callable[[], bool]) -> ModelDisk:
        """The disk as found when the power is back."""
        disk, children = ModelDisk(), {}
        for path in sorted({*self.files, *self.synced_names}):
            inode = (self.files if keep() else self.synced_names).get(path)
            if inode is not None:
                children[path] = inode.survived(keep)
        disk.files, disk.synced_names = dict(children), dict(children)
        return disk

    def _change(self) -> None:
        if self.calls_left <= 0:
            raise PowerCut
        self.calls_left -= 1
        self.num_calls += 1

    def make_folder(self, path: str) -> None:
        self._change()

    def names(self, folder: str) -> list[str]:
        return sorted(os.path.basename(path) for path in self.files)

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_CREAT:
            self._change()
            if path in self.files:
                raise FileExistsError(errno.EEXIST, "there", path)
            self.files[path] = Inode()
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "not there", path)
        fd = max(self.open_files, default=100) + 1
        self.open_files[fd] = (self.files[path], bool(flags & DIRECT))
        return fd

    def close(self, fd: int) -> None:
        del self.open_files[fd]

    def num_bytes(self, fd: int) -> int:
        return len(self.open_files[fd][0].data)

    def free_bytes(self, folder: str) -> int:
        return 1 << 30

    def _put(self, inode: Inode, data: bytes, offset: int) -> None:
        inode.data.extend(bytes(max(0, offset + len(data) - len(inode.data))))
        inode.data[offset : offset + len(data)] = data
        inode.since.append((offset, data))

    def allocate(self, fd: int, num_bytes: int) -> None:
        self._change()
        inode = self.open_files[fd][0]
        self._put(inode, bytes(num_bytes - len(inode.data)), len(inode.data))

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        inode, is_direct = self.open_files[fd]
        assert not is_direct or offset % ALIGNMENT == len(data) % ALIGNMENT == 0
        try:
            self._change()
        except PowerCut:
            if self.calls_left == 0:  # cut in the middle of this one
                self._put(inode, bytes(data[: len(data) // 2]), offset)
                self.calls_left = -1
            raise
        self._put(inode, bytes(data), offset)
        return len(data)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        part = self.open_files[fd][0].data[offset : offset + len(into)]
        into[: len(part)] = part
        return len(part)

    def sync_data(self, fd: int) -> None:
        self._change()
        inode = self.open_files[fd][0]
        inode.synced, inode.since = bytes(inode.data), []

    def sync_folder(self, path: str) -> None:
        self._change()
        self.synced_names = dict(self.files)

    def rename(self, old: str, new: str) -> None:
        self._change()
        self.files[new] = self.files.pop(old)

    def remove(self, path: str) -> None:
        if path in self.files:
            self._change()
            del self.files[path]

    def remove_folder(self, path: str) -> None:
        self._change()

    def lock(self, path: str, owner: str) -> int:
        return 1

    def unlock(self, fd: int) -> None:
        pass


class FaultyDisk(System):
    """The real one; `fault(call)` runs ahead of each call and may raise; `cut(size)` shortens reads and writes.

    What is moved is rounded up to `block` bytes, and told without the rounding.
    """

    block = 1

    def __init__(self, fault: Callable[[str], None] = lambda call: None) -> None:
        self.fault = fault
        self.cut: Callable[[int], int] = lambda size: size

    def open(self, path: str, flags: int) -> int:
        self.fault("open")
        return super().open(path, flags)

    def allocate(self, fd: int, num_bytes: int) -> None:
        self.fault("allocate")
        super().allocate(fd, num_bytes)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self.fault("write")
        count = self.cut(len(data))
        return min(count, super().write(fd, data[: -(-count // self.block) * self.block], offset))

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        self.fault("read")
        count = self.cut(len(into))
        return min(count, super().read(fd, into[: -(-count // self.block) * self.block], offset))

    def sync_data(self, fd: int) -> None:
        self.fault("sync_data")
        super().sync_data(fd)

    def sync_folder(self, path: str) -> None:
        self.fault("sync_folder")
        super().sync_folder(path)

    def rename(self, old: str, new: str) -> None:
        self.fault("rename")
        super().rename(old, new)


@attrs.define
class FailOnce:
    """The `number`-th call of one name fails, or all from there on."""

    call: str
    code: int = errno.EIO
    number: int = 0
    times: int = 1

    def __call__(self, call: str) -> None:
        if call == self.call:
            self.number -= 1
            if -self.times <= self.number < 0:
                raise OSError(self.code, os.strerror(self.code))


@pytest.fixture
def model_disk() -> type[ModelDisk]:
    return ModelDisk


@pytest.fixture
def power_cut() -> type[PowerCut]:
    return PowerCut


@pytest.fixture
def faulty_disk() -> type[FaultyDisk]:
    return FaultyDisk


@pytest.fixture
def fail_once() -> type[FailOnce]:
    return FailOnce


@pytest.fixture
def survivals() -> dict[str, Callable[[], bool]]:
    """Ways in which what was not synced may have survived: nothing, all, or anything between."""
    dice = random.Random(5)
    some: dict[str, Callable[[], bool]] = {f"half {n}": lambda: dice.random() < 0.5 for n in range(8)}
    return {"synced": lambda: False, "written": lambda: True, "most": lambda: dice.random() < 0.9, **some}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "rank-0"
