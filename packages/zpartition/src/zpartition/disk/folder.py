"""Files of a store's folder, and the order in which they change.

    zpartition.lock          held (flock) while a store is open; names the owner
    zpartition.journal       the last commit (journal.py)
    zpartition.journal.new   the next one, while it is being written
    zpartition-00007.region  the two slots of a region
    zpartition.probe         exists briefly while a store is created or opened

A commit syncs the bytes of the regions (the store does that); syncs the folder if there are new regions; writes and
syncs the next journal; renames it over the journal; syncs the folder.  A crash before the rename leaves the old
generation, whose slots have not been touched; a crash after it leaves the new one.  No slot of the old generation is
overwritten before the folder is synced, so a power failure that undoes the rename finds the old slots intact.

Removal starts with the journal: a folder without one holds no store, whatever other files remain.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from typing import final

import attrs

from zpartition.disk.errors import DiskBusy, DiskCorrupt
from zpartition.disk.files import BlockFile, to_disk_error
from zpartition.disk.journal import Journal
from zpartition.disk.memory import BounceBuffer, MemorySpan, aligned_buffer
from zpartition.disk.system import NEW, OLD, System

LOCK, PROBE = "zpartition.lock", "zpartition.probe"
JOURNAL, NEXT = "zpartition.journal", "zpartition.journal.new"
REGION = re.compile(r"zpartition-(\d{5,})\.region")


@final
@attrs.frozen(eq=False)
class Folder:
    """A store's folder; the store holds its lock."""

    system: System
    path: str
    lock_fd: int

    @classmethod
    def lock(cls, system: System, path: str) -> Folder:
        """Lock the folder.  Raises DiskBusy if another store, in this or another process, holds the lock."""
        try:
            fd = system.lock(os.path.join(path, LOCK), f"process {os.getpid()} on {socket.gethostname()}")
        except BlockingIOError as error:
            raise DiskBusy(
                f"{path}: the store is in use by {error.strerror}, or by a fork of it; close that one first, or "
                "use one folder for each rank",
                path,
            ) from None
        except OSError as error:
            raise to_disk_error(system, error, "lock the store", path) from error
        return cls(system, path, fd)

    def unlock(self) -> None:
        """Release the lock; call once."""
        self.system.unlock(self.lock_fd)

    def at(self, name: str) -> str:
        """Return the path of a file in the folder."""
        return os.path.join(self.path, name)

    def region_names(self) -> list[str]:
        """List the region files, whether the journal names them or not."""
        return [name for name in self.system.names(self.path) if REGION.fullmatch(name)]

    def new_region_name(self) -> str:
        """Return an unused file name for a region."""
        numbers = [int(found[1]) for name in self.region_names() if (found := REGION.fullmatch(name))]
        return f"zpartition-{max(numbers, default=-1) + 1:05d}.region"

    def has_journal(self) -> bool:
        """Check if the folder holds a store."""
        return JOURNAL in self.system.names(self.path)

    def read_journal(self) -> Journal:
        """Read the journal.  Raises DiskCorrupt if it does not match its checksum, and OSError."""
        data = self._read(self.at(JOURNAL))
        try:
            return Journal.decode(data)
        except (ValueError, KeyError, TypeError) as error:
            raise DiskCorrupt(self.at(JOURNAL), JOURNAL, 0, "a whole journal", str(error)) from error

    def write_next(self, journal: Journal, *, durable: bool) -> None:
        """Write journal.new completely; it does not exist after an OSError."""
        data, path = journal.encode(), self.at(NEXT)
        self.system.remove(path)
        try:
            file = BlockFile(self.system, path, self.system.open(path, NEW), False, BounceBuffer())
            try:
                memory = MemorySpan.of(aligned_buffer(len(data)), len(data))
                memory.bytes[:] = data
                file.write(memory, 0)
                if durable:
                    file.sync()
            finally:
                file.close()
        except BaseException:
            with contextlib.suppress(OSError):
                self.system.remove(path)
            raise

    def publish_next(self, *, durable: bool) -> None:
        """Commit: rename journal.new.  After an OSError the rename may or may not have happened."""
        self.system.rename(self.at(NEXT), self.at(JOURNAL))
        if durable:
            self.sync()

    def sync(self) -> None:
        """Flush the folder's names to the medium."""
        self.system.sync_folder(self.path)

    def sweep(self, kept: set[str]) -> None:
        """Remove files that a crash left, except the regions in `kept`."""
        for name in (NEXT, PROBE, *(name for name in self.region_names() if name not in kept)):
            self.system.remove(self.at(name))

    def clear(self) -> None:
        """Remove the store's files, the lock last.  Files of others stay, and then so does the folder."""
        for name in (JOURNAL, NEXT, PROBE, *self.region_names(), LOCK):
            self.system.remove(self.at(name))
        self.system.remove_folder(self.path)

    def _read(self, path: str) -> bytes:
        file = BlockFile(self.system, path, self.system.open(path, OLD), False, BounceBuffer())
        try:
            size = self.system.num_bytes(file.fd)
            memory = MemorySpan.of(aligned_buffer(size), size)
            return bytes(memory.bytes[: file.read(memory, 0)])
        finally:
            file.close()
