"""An in-memory store that records every operation and can restart from a crash after any of them.

It implements an fsspec file system.  Stores differ in what a crash leaves of an unfinished write, so there are three
variants (`Torn`): nothing (S3), the bytes that had arrived (SFTP), or an empty object (a file system that had not
flushed).  Finished writes and removals survive.  Listings are scrambled, as stores guarantee no order.
"""

from __future__ import annotations

import enum
import errno
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, final

import attrs

from zckpt.format.manifest import checksum
from zckpt.storage.lock import LockPolicy
from zckpt.storage.object_store import RemoteStorage


class Torn(enum.Enum):
    """State of an object after its write was interrupted."""

    NOTHING = "nothing"  # absent, or as before the write
    PART = "part"
    EMPTY = "empty"


@attrs.frozen
class Put:
    """One change of the store."""

    name: str  # "begin" | "write" | "end" | "discard" | "remove"
    key: str
    data: bytes = b""


@attrs.frozen
class _Object:
    data: bytes | None  # of the last finished write; None before the first
    arriving: bytes | None = None  # of the unfinished write

    def left(self, torn: Torn) -> bytes | None:
        if self.arriving is None or torn is Torn.NOTHING:
            return self.data
        return self.arriving if torn is Torn.PART else b""


PutFault: TypeAlias = "Callable[[Put], None]"  # raises to make the operation fail


def fail_put(number: int, code: int = errno.EIO) -> PutFault:
    """A fault for ModelBucket: the change of this number (from 0) fails."""
    count = itertools.count()

    def before(put: Put) -> None:
        if next(count) == number:
            raise OSError(code, os.strerror(code))

    return before


@final
@attrs.define(eq=False)
class ModelBucket:
    """Implements `zckpt.storage.object_store_files.FileSystem` in memory."""

    base: dict[str, bytes] = attrs.field(factory=dict)  # objects before the journal's first change
    journal: list[Put] = attrs.field(factory=list)  # every change so far
    before: PutFault = lambda put: None  # called before each change
    objects: dict[str, _Object] = attrs.field(init=False)  # current objects
    mutex: threading.RLock = attrs.field(factory=threading.RLock)  # ranks may be threads

    def __attrs_post_init__(self) -> None:
        self.objects = {key: _Object(data) for key, data in self.base.items()}

    def storage(self, root: str = "model:/bucket/run") -> RemoteStorage:
        """A checkpoint storage over this bucket; it takes over the lock of a dead job at once."""
        base = root.partition(":/")[2]
        return RemoteStorage(Path(root), base, self, LockPolicy(heartbeat_s=3600.0, timeout_s=0.0))

    def crash(self, at: int, torn: Torn) -> ModelBucket:
        """The store as found after a crash before change `at` of the journal."""
        replayed = ModelBucket(self.base)
        for put in self.journal[:at]:
            replayed.apply(put)
        left = {key: each.left(torn) for key, each in replayed.objects.items()}
        return ModelBucket({key: data for key, data in left.items() if data is not None})

    def apply(self, put: Put) -> None:
        """Apply a change, then record it in the journal."""
        with self.mutex:
            self.before(put)
            there = self.objects.get(put.key, _Object(None))
            if put.name == "remove":
                self._visible(put.key)
                del self.objects[put.key]
            elif put.name == "discard":
                self.objects[put.key] = _Object(there.data)
            elif put.name == "end":
                self.objects[put.key] = _Object(there.arriving or b"")
            else:
                arriving = b"" if put.name == "begin" else (there.arriving or b"") + put.data
                self.objects[put.key] = _Object(there.data, arriving)
            self.journal.append(put)

    def _visible(self, key: str) -> bytes:
        with self.mutex:
            data = self.objects.get(key, _Object(None)).data
        if data is None:
            raise FileNotFoundError(key)
        return data

    def _below(self, path: str) -> set[str]:
        """Visible names below a path."""
        with self.mutex:
            keys = [key for key, each in self.objects.items() if each.data is not None]
        return {key[len(path) + 1 :].split("/")[0] for key in keys if key.startswith(f"{path}/")}

    def info(self, path: str) -> dict[str, Any]:
        if self._below(path):
            return {"name": path, "size": 0, "type": "directory"}
        return {"name": path, "size": len(self._visible(path)), "type": "file"}

    def ls(self, path: str, detail: bool = True) -> list[Any]:
        infos = [self.info(f"{path}/{name}") for name in self._below(path)]
        if not infos:
            raise FileNotFoundError(path)
        return sorted(infos, key=lambda each: checksum(str(each["name"]).encode()))

    def open(self, path: str, mode: str) -> ModelUpload:
        assert mode == "wb", mode
        self.apply(Put("begin", path))
        return ModelUpload(self, path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        return self._visible(path)[start:end]

    def pipe_file(self, path: str, value: bytes) -> None:
        upload = self.open(path, "wb")
        upload.write(memoryview(value))
        upload.close()

    def rm_file(self, path: str) -> None:
        self.apply(Put("remove", path))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """No operation: there are no folders."""

    def rmdir(self, path: str) -> None:
        raise FileNotFoundError(path)

    def invalidate_cache(self, path: str | None = None) -> None:
        """No operation: there is no cache."""

    @staticmethod
    def _strip_protocol(path: str) -> str:
        return path.rpartition("://")[2]


@final
@attrs.frozen(eq=False)
class ModelUpload:
    """An object being written."""

    bucket: ModelBucket
    key: str

    def write(self, data: memoryview) -> int:
        """Write two halves, so that a crash can fall in the middle of each write."""
        whole = bytes(data)
        for half in (whole[: len(whole) // 2], whole[len(whole) // 2 :]):
            self.bucket.apply(Put("write", self.key, half))
        return len(whole)

    def close(self) -> None:
        self.bucket.apply(Put("end", self.key))

    def discard(self) -> None:
        """Abort the upload."""
        self.bucket.apply(Put("discard", self.key))
