"""Checkpoints on any file system that `fsspec` supports: S3, Google Cloud, Azure, SFTP, HDFS, memory.

    zckpt.save("s3://bucket/run", "step-100", ...)                         # credentials as fsspec finds them
    zckpt.save(url, "step-100", ..., storage=zckpt.remote(url, endpoint_url="https://..."))

Such a store guarantees less than a disk: no folders, no atomic rename, no locks, and some show half-written files.
`RemoteStorage` implements the operations of `Storage` with what all stores have (write an object, read a range of it,
list, remove), so that the commit protocol runs on it unchanged.  rename_marker.py explains folder names, lock.py the
lock.  It assumes that an object is durable when its write returns, and that a later listing shows it.  The order of a
listing is ignored, and listings are never cached.

A path is the URL as a pathlib.Path, which turns "s3://bucket/run" into "s3:/bucket/run"; both spellings are valid
roots (locate.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any, final

import attrs

from zckpt.storage.frugal_reader import UNKNOWN, Access
from zckpt.storage.lock import HeartbeatLock, LockObject, LockPolicy, acquire
from zckpt.storage.object_store_files import FileSystem, StoreReader, StoreWriter, as_os_errors
from zckpt.storage.rename_marker import (
    AttemptFolder,
    MarkerChange,
    is_marker,
    parse_attempt_folder,
    plan_rename,
    tag_of,
    unfinished_folder,
    visible_names,
)
from zckpt.storage.storage import Lock, PathKind, Reader, Writer

# Schemes of stores without folders.  There, makedirs of fsspec creates the bucket if it sees none, which must not
# happen for a misspelt name, or for credentials that may not list the bucket.
_FOLDERLESS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci"}
_UNKNOWN_FREE = 1 << 62  # stores do not report their free space
_MAX_RENAMED_NBYTES = 1 << 20  # a renamed file is copied; only `latest` is ever renamed


@final
@attrs.define(eq=False)
class RemoteStorage:
    """The `Storage` of one checkpoint root on an fsspec file system."""

    root: Path  # prefix of the paths passed to the methods
    base: str  # native path of `root`
    files: FileSystem
    lock_policy: LockPolicy = attrs.field(factory=LockPolicy)
    held_locks: list[HeartbeatLock] = attrs.field(factory=list)  # held by this object
    folders: dict[str, AttemptFolder] = attrs.field(factory=dict)  # visible name -> folder, for paths inside it

    def kind(self, path: Path) -> PathKind:
        """Type of a path.  Folders above the root are assumed to exist: credentials may not allow listing them."""
        if path != self.root and self.root.is_relative_to(path):
            return PathKind.FOLDER
        name = _folder_name(self.root, path)
        if name and path == self.root / name and tag_of(name) and self._find_folders(tag_of(name)).get(name):
            return PathKind.FOLDER
        if name and unfinished_folder(name) and path == self.root / name:
            return PathKind.ABSENT
        try:
            return self._kind(self._native(path), path)
        except FileNotFoundError:
            return PathKind.ABSENT

    def names(self, folder: Path) -> list[str]:
        if folder != self.root:
            return sorted(name for name in self._list(self._native(folder), folder) if not is_marker(name))
        try:
            entries = self._list(self.base, folder)
        except FileNotFoundError:  # a prefix without objects
            return []
        plain = {name for name in entries if parse_attempt_folder(name) is None}
        return sorted(plain | set(self._visible(entries)))

    def nbytes(self, path: Path) -> int:
        with as_os_errors(path):
            return int(self._info(self._native(path))["size"])

    def free_bytes(self, folder: Path) -> int:
        return _UNKNOWN_FREE

    def open(self, path: Path, *, access: Access = UNKNOWN) -> Reader:
        native = self._native(path)
        if self._kind(native, path) is not PathKind.FILE:
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        return StoreReader(path, self.files, native, self.nbytes(path))

    def create(self, path: Path) -> Writer:
        native = self._native(path)
        with as_os_errors(path):
            if self.kind(path) is not PathKind.ABSENT:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            return StoreWriter(path, self.files, native, self.files.open(native, "wb"))

    def make_folder(self, path: Path) -> None:
        """Make the folder and its parents, on stores that have folders."""
        if str(self.root).partition(":/")[0] not in _FOLDERLESS:
            with as_os_errors(path):
                self.files.makedirs(self._native(path), exist_ok=True)

    def rename(self, old: Path, new: Path) -> None:
        name = _folder_name(self.root, old)
        moved = self._find_folders(tag_of(name)).get(name) if old == self.root / name and tag_of(name) else None
        if moved is None:
            self._rename_file(old, new)
        else:
            self._rename_folder(moved, old, new)

    def remove(self, path: Path) -> None:
        is_attempt = path.parent == self.root and unfinished_folder(path.name) is not None
        if is_attempt or self.kind(path) is PathKind.FOLDER:  # an attempt folder vanishes with its last object
            self._remove_folder(path)
        else:
            with as_os_errors(path):
                self.files.rm_file(self._native(path))

    def sync_folder(self, folder: Path) -> None:
        """No operation: names are durable when the calls that create them return."""

    def lock(self, path: Path, owner: str) -> Lock:
        held = acquire(self._lock_object(path), owner, self.lock_policy)
        self.held_locks = [*(each for each in self.held_locks if not each.released.is_set()), held]
        return held

    def _rename_folder(self, moved: AttemptFolder, old: Path, new: Path) -> None:
        inside = self._list(f"{self.base}/{moved.name}", old)
        change = plan_rename(moved, inside, new.name) if new.parent == self.root else None
        if change is None:
            raise OSError(errno.EXDEV, f"cannot be renamed to {new.name!r}", str(old))
        if new.name == moved.tag and self.kind(new) is not PathKind.ABSENT:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(new))
        for held in self.held_locks:
            if not held.released.is_set():
                held.check_held()
        self._apply(moved, change, old)

    def _apply(self, moved: AttemptFolder, change: MarkerChange, path: Path) -> None:
        self.folders.clear()
        with as_os_errors(path):
            for marker in change.write:
                self.files.pipe_file(f"{self.base}/{moved.name}/{marker}", b"zckpt\n")
            for marker in change.remove:
                self._remove_marker(f"{self.base}/{moved.name}/{marker}")

    def _remove_marker(self, native: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._info(native)
            self.files.rm_file(native)

    def _rename_file(self, old: Path, new: Path) -> None:
        """Copy, then remove.  A crash in between leaves both, and readers then prefer `old`."""
        source, target = self._native(old), self._native(new)
        with as_os_errors(old):
            if self._info(source)["size"] > _MAX_RENAMED_NBYTES:
                raise OSError(errno.EFBIG, "too large to be renamed on this store", str(old))
            data = self.files.cat_file(source)
        with as_os_errors(new):
            self.files.pipe_file(target, data)
        with as_os_errors(old):
            self.files.rm_file(source)

    def _remove_folder(self, path: Path) -> None:
        native, present = self._native(path), []
        with contextlib.suppress(FileNotFoundError):
            present = self._list(native, path)
        if not all(map(is_marker, present)):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        moved = parse_attempt_folder(native.rpartition("/")[2])
        if moved is not None:
            self._apply(moved, MarkerChange((), tuple(sorted(present, key=lambda name: name != "committed"))), path)
        with as_os_errors(path), contextlib.suppress(FileNotFoundError):
            if self._info(native)["type"] == "directory":  # stores without folders have nothing left by now
                self.files.rmdir(native)

    def _lock_object(self, path: Path) -> LockObject:
        native = self._native(path)

        def read() -> str:
            try:
                with as_os_errors(path):
                    self._info(native)
                    return self.files.cat_file(native).decode(errors="replace") or "\n"
            except FileNotFoundError:
                return ""

        def write(text: str) -> None:
            with as_os_errors(path):
                self.files.pipe_file(native, text.encode())

        def remove() -> None:
            with as_os_errors(path):
                self.files.rm_file(native)

        return LockObject(path, read, write, remove)

    def _native(self, path: Path) -> str:
        """Path in the store, whether it exists or not."""
        if not path.is_relative_to(self.root):
            return native_path(self.files, path)
        parts = path.relative_to(self.root).parts
        if not parts:
            return self.base
        at = unfinished_folder(parts[0]) or self.folders.get(parts[0])
        if at is None and tag_of(parts[0]):
            at = self._find_folders(tag_of(parts[0])).get(parts[0])
        return "/".join([self.base, at.name if at else parts[0], *parts[1:]])

    def _find_folders(self, tag: str = "") -> dict[str, AttemptFolder]:
        """Visible name -> attempt folder, of one tag or of all; {} if there is no root."""
        try:
            entries = self._list(self.base, self.root)
        except FileNotFoundError:
            return {}
        return self._visible(entries, tag)

    def _visible(self, entries: list[str], tag: str = "") -> dict[str, AttemptFolder]:
        """Visible name -> attempt folder among the entries of the root; lists each folder for its markers."""
        found = [each for each in map(parse_attempt_folder, entries) if each is not None and tag in ("", each.tag)]
        now = visible_names({each: self._list_folder(each) for each in found})
        self.folders = {name: each for name, each in self.folders.items() if tag and each.tag != tag} | now
        return now

    def _list_folder(self, each: AttemptFolder) -> list[str]:
        try:
            return self._list(f"{self.base}/{each.name}", self.root / each.name)
        except FileNotFoundError:  # removed in the meantime
            return []

    def _list(self, native: str, path: Path) -> list[str]:
        with as_os_errors(path):
            self.files.invalidate_cache(native)
            found = [str(entry["name"]).rstrip("/") for entry in self.files.ls(native, detail=True)]
        return [name.rpartition("/")[2] for name in found if name.strip("/") != native.strip("/")]

    def _info(self, native: str) -> dict[str, Any]:
        self.files.invalidate_cache(native.rpartition("/")[0])
        return self.files.info(native)

    def _kind(self, native: str, path: Path) -> PathKind:
        with as_os_errors(path):
            kinds = {"file": PathKind.FILE, "directory": PathKind.FOLDER}
            return kinds.get(self._info(native)["type"], PathKind.OTHER)


def _folder_name(root: Path, path: Path) -> str:
    """Name of the root's entry that contains the path; "" for a path outside or the root itself."""
    parts = path.relative_to(root).parts if path.is_relative_to(root) else ()
    return parts[0] if parts else ""


def native_path(files: Any, path: Path) -> str:
    """Native path of the file system: "bucket/run" for "s3:/bucket/run"."""
    protocol, colon, rest = str(path).partition(":/")
    if protocol in ("file", "local"):
        return f"/{rest}"
    return str(files._strip_protocol(f"{protocol}://{rest}" if colon else str(path))).rstrip("/")
