"""The names in a store's folder, and the order in which they change.

    zpartition.lock          held (flock) while a store is open; says by whom
    zpartition.journal       what is committed (journal.py)
    zpartition.journal.new   the next one, while it is being written
    zpartition-00007.region  the two slots of a region
    zpartition.probe         for a moment, while a store is made or opened

A commit is: the regions' bytes synced (by the store); the folder synced, if it has new regions; the next journal
written and synced; renamed to be the journal; the folder synced.  A crash before the rename leaves the old
generation, whose slots nobody has touched; a crash after it leaves the new one.  Nobody writes to a slot of the old
generation before the folder is synced, so a power cut that undoes the rename finds the old slots whole.

Removal begins with the journal: a folder without one is no store, whatever else is left in it.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from typing import final

import attrs

from .errors import DiskBusy, DiskCorrupt
from .files import BlockFile, explain
from .journal import Journal
from .memory import Bounce, Memory, aligned
from .system import NEW, OLD, System

LOCK, PROBE = "zpartition.lock", "zpartition.probe"
JOURNAL, NEXT = "zpartition.journal", "zpartition.journal.new"
REGION = re.compile(r"zpartition-(\d{5,})\.region")


@final
@attrs.frozen(eq=False)
class Folder:
    """A store's folder, whose lock is held."""

    system: System
    path: str
    lock_fd: int

    @classmethod
    def lock(cls, system: System, path: str) -> Folder:
        """DiskBusy if another store has it, of this process or of another."""
        try:
            fd = system.lock(os.path.join(path, LOCK), f"process {os.getpid()} on {socket.gethostname()}")
        except BlockingIOError as error:
            raise DiskBusy(
                f"{path}: the store is in use by {error.strerror}, or a fork of it; close that one first, or "
                "give each rank a folder of its own",
                path,
            ) from None
        except OSError as error:
            raise explain(system, error, "lock the store", path) from error
        return cls(system, path, fd)

    def unlock(self) -> None:
        """Once."""
        self.system.unlock(self.lock_fd)

    def at(self, name: str) -> str:
        """The path of a file in it."""
        return os.path.join(self.path, name)

    def region_names(self) -> list[str]:
        """Files of regions, whether the journal knows them or not."""
        return [name for name in self.system.names(self.path) if REGION.fullmatch(name)]

    def new_region_name(self) -> str:
        """One that no region has."""
        numbers = [int(found[1]) for name in self.region_names() if (found := REGION.fullmatch(name))]
        return f"zpartition-{max(numbers, default=-1) + 1:05d}.region"

    def has_journal(self) -> bool:
        """Whether there is a store."""
        return JOURNAL in self.system.names(self.path)

    def read_journal(self) -> Journal:
        """DiskCorrupt if it is not what was written; OSError."""
        data = self._read(self.at(JOURNAL))
        try:
            return Journal.decode(data)
        except (ValueError, KeyError, TypeError) as error:
            raise DiskCorrupt(self.at(JOURNAL), JOURNAL, 0, "a whole journal", str(error)) from error

    def write_next(self, journal: Journal, *, durable: bool) -> None:
        """journal.new, whole, or not there at all (OSError)."""
        data, path = journal.encode(), self.at(NEXT)
        self.system.remove(path)
        try:
            file = BlockFile(self.system, path, self.system.open(path, NEW), False, Bounce())
            try:
                memory = Memory.of(aligned(len(data)), len(data))
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
        """The commit; after an OSError it may or may not have happened."""
        self.system.rename(self.at(NEXT), self.at(JOURNAL))
        if durable:
            self.sync()

    def sync(self) -> None:
        """Its names are on the medium."""
        self.system.sync_folder(self.path)

    def sweep(self, kept: set[str]) -> None:
        """Remove what a crash left beside the regions of the journal."""
        for name in (NEXT, PROBE, *(name for name in self.region_names() if name not in kept)):
            self.system.remove(self.at(name))

    def clear(self) -> None:
        """Remove the store's files, the lock last; other people's stay, and then the folder does."""
        for name in (JOURNAL, NEXT, PROBE, *self.region_names(), LOCK):
            self.system.remove(self.at(name))
        self.system.remove_folder(self.path)

    def _read(self, path: str) -> bytes:
        file = BlockFile(self.system, path, self.system.open(path, OLD), False, Bounce())
        try:
            size = self.system.num_bytes(file.fd)
            memory = Memory.of(aligned(size), size)
            return bytes(memory.bytes[: file.read(memory, 0)])
        finally:
            file.close()
