"""Fault injection: a wrapper around any storage whose operations can fail."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, final

import attrs

from zckpt.storage.frugal_reader import UNKNOWN, Access
from zckpt.storage.storage import Lock, PathKind, Reader, Storage, Writer

WRITING = frozenset({"create", "write", "sync", "make_folder", "rename", "remove", "sync_folder"})


Fault: TypeAlias = "Callable[[str, Path], None]"  # (operation, path); raises to make it fail


def fail_at(number: int, code: int = errno.EIO, *, operations: frozenset[str] = WRITING) -> Fault:
    """Fault for FaultyStorage: the operation of this number (from 0, counting only `operations`) fails."""
    count = itertools.count()

    def before(operation: str, path: Path) -> None:
        if operation in operations and next(count) == number:
            raise OSError(code, os.strerror(code), str(path))

    return before


@final
@attrs.frozen(eq=False)
class FaultyStorage:
    """Calls `before(operation, path)` before each operation, which fails if that raises."""

    inner: Storage
    before: Fault

    def kind(self, path: Path) -> PathKind:
        self.before("kind", path)
        return self.inner.kind(path)

    def names(self, folder: Path) -> list[str]:
        self.before("names", folder)
        return self.inner.names(folder)

    def nbytes(self, path: Path) -> int:
        self.before("nbytes", path)
        return self.inner.nbytes(path)

    def free_bytes(self, folder: Path) -> int:
        self.before("free_bytes", folder)
        return self.inner.free_bytes(folder)

    def open(self, path: Path, *, access: Access = UNKNOWN) -> Reader:
        self.before("open", path)
        return _FaultyReader(self.inner.open(path, access=access), path, self.before)

    def create(self, path: Path) -> Writer:
        self.before("create", path)
        return _FaultyWriter(self.inner.create(path), path, self.before)

    def make_folder(self, path: Path) -> None:
        self.before("make_folder", path)
        self.inner.make_folder(path)

    def rename(self, old: Path, new: Path) -> None:
        self.before("rename", old)
        self.inner.rename(old, new)

    def remove(self, path: Path) -> None:
        self.before("remove", path)
        self.inner.remove(path)

    def sync_folder(self, folder: Path) -> None:
        self.before("sync_folder", folder)
        self.inner.sync_folder(folder)

    def lock(self, path: Path, owner: str) -> Lock:
        self.before("lock", path)
        return self.inner.lock(path, owner)


@attrs.frozen(eq=False)
class _FaultyWriter:
    inner: Writer
    path: Path
    before: Fault

    def write(self, data: memoryview) -> None:
        self.before("write", self.path)
        self.inner.write(data)

    def sync(self) -> None:
        self.before("sync", self.path)
        self.inner.sync()

    def __enter__(self) -> _FaultyWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.inner.__exit__(*exc)


@attrs.frozen(eq=False)
class _FaultyReader:
    inner: Reader
    path: Path
    before: Fault

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    @property
    def step_nbytes(self) -> int:
        return self.inner.step_nbytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.before("read_into", self.path)
        self.inner.read_into(offset, buffer)

    def __enter__(self) -> _FaultyReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.inner.__exit__(*exc)
