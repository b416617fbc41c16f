"""Objects of an fsspec file system: written as a stream, read by ranges.

`FileSystem` is the part of fsspec used here, so that tests can substitute their own store.  Stores raise errors of
any class; the functions here raise OSError with an errno and the path.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, final

import attrs

from zckpt.storage.storage import Writer


class FileSystem(Protocol):
    """The methods of an fsspec file system that zckpt uses; paths are native, without a protocol."""

    def info(self, path: str) -> dict[str, Any]: ...
    def ls(self, path: str, detail: bool = True) -> list[Any]: ...
    def open(self, path: str, mode: str) -> Any: ...
    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes: ...
    def pipe_file(self, path: str, value: bytes) -> Any: ...
    def rm_file(self, path: str) -> Any: ...
    def makedirs(self, path: str, exist_ok: bool = False) -> Any: ...
    def rmdir(self, path: str) -> Any: ...
    def invalidate_cache(self, path: str | None = None) -> Any: ...


class as_os_errors(contextlib.AbstractContextManager[None]):  # noqa: N801 - reads as a verb
    """Convert any error of a store into an OSError with an errno and the path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not isinstance(error, Exception):
            return
        if isinstance(error, OSError) and error.errno is not None:
            error.filename = str(self.path)  # instead of the native path
            return
        for known, code in _CODES.items():
            if isinstance(error, known):
                raise known(code, os.strerror(code), str(self.path)) from error
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", str(self.path)) from error


_CODES: dict[type[OSError], int] = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    NotADirectoryError: errno.ENOTDIR,
    IsADirectoryError: errno.EISDIR,
    TimeoutError: errno.ETIMEDOUT,
}


@final
@attrs.define(eq=False)
class StoreWriter:
    """Writes one object.  `sync` closes it, as an object is durable only as a whole."""

    path: Path
    files: FileSystem
    native: str
    handle: Any
    written_nbytes: int = 0
    is_open: bool = True

    def write(self, data: memoryview) -> None:
        rest = data.cast("B")
        with as_os_errors(self.path):
            while len(rest):
                count = self.handle.write(rest)
                count = len(rest) if count is None else int(count)
                self.written_nbytes += count
                rest = rest[count:]

    def sync(self) -> None:
        with as_os_errors(self.path):
            self._close()
            found = self.files.info(self.native)["size"]
            if found != self.written_nbytes:
                text = f"the store holds {found:,} bytes of {self.written_nbytes:,} bytes written"
                raise OSError(errno.EIO, text)

    def _close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.handle.close()
            self.files.invalidate_cache(self.native)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[:1] == (None,):
            with as_os_errors(self.path):
                self._close()
        elif self.is_open:  # abort the upload; no reader sees an unfinished object
            self.is_open = False
            try:
                self.handle.discard()
            except Exception:  # not every store supports it
                with contextlib.suppress(Exception):
                    self.handle.close()


@final
@attrs.frozen(eq=False)
class StoreReader:
    """Reads one object, one range request per call; thread-safe."""

    path: Path
    files: FileSystem
    native: str
    nbytes: int
    step_nbytes: int = 8 << 20  # a request costs as much as transferring some megabytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        rest = buffer.cast("B")
        if not len(rest):
            return
        with as_os_errors(self.path):
            data = self.files.cat_file(self.native, start=offset, end=offset + len(rest))
            if len(data) != len(rest):
                raise OSError(errno.EIO, f"file ends before byte {offset + len(rest):,}")
        rest[:] = data

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(self, *exc: object) -> None:
        pass
