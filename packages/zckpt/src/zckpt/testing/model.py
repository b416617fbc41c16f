"""An in-memory file system that records every operation and can restart from a crash after any of them.

After a power cut, POSIX guarantees only fsynced bytes of files and the names in fsynced folders; everything else may
or may not survive.  So each of three things is either as last synced or as last written: the names in folders that
hold folders (a checkpoint root), the names in folders that hold only files (a checkpoint), and the bytes of files.
SURVIVALS has all eight combinations; the one where everything is as written models a killed process, which loses
nothing.  A rename is atomic in all of them.
"""

from __future__ import annotations

import copy
import errno
import itertools
import os
import threading
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import final

import attrs

from zckpt.storage.frugal_reader import UNKNOWN, Access
from zckpt.storage.storage import PathKind


class Kept(Enum):
    """State of one thing after a crash."""

    SYNCED = "synced"  # as last synced: the minimum that POSIX guarantees
    WRITTEN = "written"  # as last written


@attrs.frozen
class Survival:
    """State of a file system after a crash."""

    outer_names: Kept  # names in a folder that holds a folder
    inner_names: Kept  # names in a folder that holds none
    data: Kept


SURVIVALS = tuple(Survival(*each) for each in itertools.product(Kept, repeat=3))
KILLED = Survival(Kept.WRITTEN, Kept.WRITTEN, Kept.WRITTEN)


@attrs.frozen
class Op:
    """One change of the file system."""

    name: str  # "make_folder" | "create" | "write" | "sync" | "sync_folder" | "rename" | "remove"
    path: Path
    other: Path = Path()  # the new name, of a rename
    data: bytes = b""  # of a write


@attrs.define(eq=False)
class _File:
    data: bytes = b""
    synced: bytes = b""


@attrs.define(eq=False)
class _Folder:
    names: dict[str, _File | _Folder] = attrs.field(factory=dict)
    synced: dict[str, _File | _Folder] = attrs.field(factory=dict)


@final
@attrs.define(eq=False)
class ModelStorage:
    """Implements zckpt.Storage in memory.  Paths are absolute; "/" exists and is durable."""

    free: int = 1 << 40
    journal: list[Op] = attrs.field(factory=list)  # every operation so far
    base: _Folder = attrs.field(factory=_Folder)  # root folder before the journal's first operation
    top: _Folder = attrs.field(init=False)  # current root folder
    locks: dict[Path, str] = attrs.field(factory=dict)  # path of a held lock -> owner
    mutex: threading.RLock = attrs.field(factory=threading.RLock)  # ranks may be threads

    def __attrs_post_init__(self) -> None:
        self.top = copy.deepcopy(self.base)

    def crash(self, at: int, survival: Survival) -> ModelStorage:
        """The file system after a crash before operation `at` of the journal; locks are released.

        After KILLED, unsynced data stays unsynced, and a second crash may lose it.
        """
        replayed = ModelStorage(free=self.free, base=self.base)
        for op in self.journal[:at]:
            replayed.apply(op)
        base = replayed.top if survival == KILLED else _survived_folder(replayed.top, survival)
        return ModelStorage(free=self.free, base=base)

    def apply(self, op: Op) -> None:
        """Apply an operation, then record it in the journal."""
        with self.mutex:
            getattr(self, f"_do_{op.name}")(op)
            self.journal.append(op)

    def kind(self, path: Path) -> PathKind:
        with self.mutex:
            node = self._find(path)
        return PathKind.ABSENT if node is None else PathKind.FOLDER if isinstance(node, _Folder) else PathKind.FILE

    def names(self, folder: Path) -> list[str]:
        with self.mutex:
            return sorted(self._folder(folder).names)

    def nbytes(self, path: Path) -> int:
        with self.mutex:
            return len(self._file(path).data)

    def free_bytes(self, folder: Path) -> int:
        return self.free

    def open(self, path: Path, *, access: Access = UNKNOWN) -> ModelReader:
        with self.mutex:
            return ModelReader(path, self._file(path).data)

    def create(self, path: Path) -> ModelWriter:
        self.apply(Op("create", path))
        return ModelWriter(self, path)

    def make_folder(self, path: Path) -> None:
        self.apply(Op("make_folder", path))

    def rename(self, old: Path, new: Path) -> None:
        self.apply(Op("rename", old, new))

    def remove(self, path: Path) -> None:
        self.apply(Op("remove", path))

    def sync_folder(self, folder: Path) -> None:
        self.apply(Op("sync_folder", folder))

    def lock(self, path: Path, owner: str) -> ModelLock:
        with self.mutex:
            if path in self.locks:
                raise BlockingIOError(errno.EWOULDBLOCK, self.locks[path], str(path))
            self.locks[path] = owner
        return ModelLock(self, path)

    def _find(self, path: Path) -> _File | _Folder | None:
        node: _File | _Folder | None = self.top
        for part in path.parts[1:]:
            node = node.names.get(part) if isinstance(node, _Folder) else None
        return node

    def _file(self, path: Path) -> _File:
        node = self._find(path)
        if not isinstance(node, _File):
            raise _os_error(errno.ENOENT, path)
        return node

    def _folder(self, path: Path) -> _Folder:
        node = self._find(path)
        if not isinstance(node, _Folder):
            raise _os_error(errno.ENOENT if node is None else errno.ENOTDIR, path)
        return node

    def _add(self, path: Path, node: _File | _Folder) -> None:
        parent = self._folder(path.parent)
        if path.name in parent.names:
            raise _os_error(errno.EEXIST, path)
        parent.names[path.name] = node

    def _do_make_folder(self, op: Op) -> None:
        self._add(op.path, _Folder())

    def _do_create(self, op: Op) -> None:
        self._add(op.path, _File())

    def _do_write(self, op: Op) -> None:
        file = self._file(op.path)
        file.data += op.data

    def _do_sync(self, op: Op) -> None:
        file = self._file(op.path)
        file.synced = file.data

    def _do_sync_folder(self, op: Op) -> None:
        folder = self._folder(op.path)
        folder.synced = dict(folder.names)

    def _do_rename(self, op: Op) -> None:
        source, target = self._folder(op.path.parent), self._folder(op.other.parent)
        there, node = target.names.get(op.other.name), source.names.get(op.path.name)
        if node is None:
            raise _os_error(errno.ENOENT, op.path)
        if isinstance(there, _Folder) and there.names:
            raise _os_error(errno.ENOTEMPTY, op.other)
        target.names[op.other.name] = source.names.pop(op.path.name)

    def _do_remove(self, op: Op) -> None:
        parent, node = self._folder(op.path.parent), self._find(op.path)
        if node is None or (isinstance(node, _Folder) and node.names):
            raise _os_error(errno.ENOENT if node is None else errno.ENOTEMPTY, op.path)
        del parent.names[op.path.name]


def _os_error(code: int, path: Path) -> OSError:
    return OSError(code, os.strerror(code), str(path))


def _survived_folder(folder: _Folder, survival: Survival) -> _Folder:
    holds_folders = any(isinstance(each, _Folder) for each in (*folder.names.values(), *folder.synced.values()))
    kept = survival.outer_names if holds_folders else survival.inner_names
    names = folder.synced if kept is Kept.SYNCED else folder.names
    made = {name: _survived(child, survival) for name, child in names.items()}
    return _Folder(made, dict(made))


def _survived(node: _File | _Folder, survival: Survival) -> _File | _Folder:
    if isinstance(node, _Folder):
        return _survived_folder(node, survival)
    data = node.synced if survival.data is Kept.SYNCED else node.data
    return _File(data, data)


@final
@attrs.frozen(eq=False)
class ModelWriter:
    storage: ModelStorage
    path: Path

    def write(self, data: memoryview) -> None:
        """Write two halves, so that a crash can fall in the middle of each write."""
        whole = bytes(data)
        for half in (whole[: len(whole) // 2], whole[len(whole) // 2 :]):
            self.storage.apply(Op("write", self.path, data=half))

    def sync(self) -> None:
        self.storage.apply(Op("sync", self.path))

    def __enter__(self) -> ModelWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


@final
@attrs.frozen(eq=False)
class ModelReader:
    path: Path
    data: bytes
    step_nbytes: int = 1 << 20

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        part: Sequence[int] = self.data[offset : offset + len(buffer)]
        if len(part) != len(buffer):
            raise OSError(errno.EIO, "file ends before", str(self.path))
        buffer[:] = bytes(part)

    def __enter__(self) -> ModelReader:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


@final
@attrs.frozen(eq=False)
class ModelLock:
    storage: ModelStorage
    path: Path
    is_exclusive: bool = True

    def release(self) -> None:
        with self.storage.mutex:
            self.storage.locks.pop(self.path, None)
