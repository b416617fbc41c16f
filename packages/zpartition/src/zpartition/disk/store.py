"""A store of bytes on disk, for optimizer states and weights that do not fit into memory.

The problem.  A training step reads some gigabytes, changes them and writes them back.  A write takes long, can fail
half-way, and the values that it replaces are the only ones there are; a step that is half written is no step at all.

The design.  Every region has two slots.  Writes go to the one that is not current, and `commit` makes all that was
written current at once, by renaming a small journal (folder.py says in which order).  So whatever happens (an
exception, a full disk, kill -9, a power cut), the last committed step is there, whole; the price is twice the room,
and no copy is ever made.  Transfers are asynchronous: a pool of threads does preads and pwrites, by default past the
page cache (O_DIRECT), which otherwise would fill with what was to be kept out of memory.  Every chunk has a checksum,
verified whenever it is read.

A store belongs to one process; a folder belongs to one store.  It knows bytes and files, nothing of ranks.

Rejected.  libaio and io_uring: a compiled extension or a library that has to be installed, for what four threads do
at the drive's speed.  mmap: an error of the drive is a signal that kills the process.  Writing in place with a log of
old values: every byte is written twice, and a crash needs a repair before anything can be read.  One file for all
regions: where transfers are buffered, one file is written by one thread at a time.
"""

from __future__ import annotations

import contextlib
import enum
import os
import weakref
from collections.abc import Iterator, Mapping
from types import MappingProxyType, TracebackType
from typing import final

import attrs
from torch import Tensor

from .errors import DiskClosed, DiskCorrupt, DiskError, DiskExists, DiskMissing
from .files import BlockFile, allows_direct, naming
from .folder import JOURNAL, PROBE, Folder
from .holdings import AtEnd, Holdings, close_files
from .journal import Entry, Journal
from .memory import Bounce, Memory, aligned, padded
from .options import Direct, DiskOptions
from .region import Pending, Region
from .system import System
from .transfer import Direction, Transfer

DEFAULTS = DiskOptions()


class Phase(enum.Enum):
    """What the journal on disk is, compared with what the store has in memory."""

    OPEN = "open"  # the same generation
    UNSURE = "unsure"  # a rename was begun and not seen through: this generation or the next; settled before a write
    CLOSED = "closed"


@final
@attrs.define(eq=False)
class DiskStore:
    """Regions of bytes in the files of one folder; see the head of this file.

    Make one with `create` or `open`.  Its methods are for one thread; transfers may be waited for in any.
    """

    holdings: Holdings  # folder, files, threads: what has to be given back
    options: DiskOptions
    is_direct: bool  # transfers pass by the page cache
    journal: Journal  # what is committed
    next_journal: Journal  # what journal.new holds, to be renamed; the same one if nothing is prepared
    bounce: Bounce  # of all files: one chunk a thread
    phase: Phase = Phase.OPEN
    release: weakref.finalize[..., DiskStore] = attrs.field(init=False)  # gives back the holdings, once

    def __attrs_post_init__(self) -> None:
        self.release = weakref.finalize(self, self.holdings.give_back)  # when the store is dropped, or by `close`

    @classmethod
    def create(
        cls, directory: str | os.PathLike[str], options: DiskOptions = DEFAULTS, *, system: System | None = None
    ) -> DiskStore:
        """A new, empty store; the folder is made, and should lie on the drive and carry the rank in its name.

        DiskBusy while another store has the folder, DiskExists when one was left there (open or remove it).
        """
        calls, path = system or System(), os.path.abspath(directory)
        with naming(calls, "make the store's folder", path):
            calls.make_folder(path)
        folder = Folder.lock(calls, path)
        with _unlocking_on_error(folder), naming(calls, "make the store", path):
            if folder.has_journal():
                raise DiskExists(
                    f"{path}: holds a store that a process has left; DiskStore.open() it, to go on from its last "
                    "commit, or DiskStore.remove() it",
                    path,
                )
            folder.sweep(set())
            journal = Journal(0, options.chunk_bytes, ())
            folder.write_next(journal, durable=options.durable)
            folder.publish_next(durable=options.durable)
            if options.durable:
                calls.sync_folder(os.path.dirname(path))
            return cls._start(folder, options, journal)

    @classmethod
    def open(
        cls, directory: str | os.PathLike[str], options: DiskOptions = DEFAULTS, *, system: System | None = None
    ) -> DiskStore:
        """The store that a process has left, as of its last commit; what came after that is removed.

        DiskMissing if there is none, DiskBusy, DiskCorrupt, DiskFailed.  Checksums are verified on each read.
        The chunk size is the one that it was made with.
        """
        calls, path = system or System(), os.path.abspath(directory)
        folder = _lock_existing(calls, path)
        with _unlocking_on_error(folder), naming(calls, "open the store", path):
            journal = folder.read_journal()
            folder.sweep({each.file for each in journal.entries})
            return cls._start(folder, attrs.evolve(options, chunk_bytes=journal.chunk_bytes), journal)

    @staticmethod
    def remove(directory: str | os.PathLike[str], *, system: System | None = None) -> None:
        """Remove the store that a process has left, and its folder if nothing else is in it; none is fine."""
        calls, path = system or System(), os.path.abspath(directory)
        with contextlib.suppress(DiskMissing):
            folder = _lock_existing(calls, path)
            try:
                with naming(calls, "remove the store", path):
                    folder.clear()
            finally:
                folder.unlock()

    @classmethod
    def _start(cls, folder: Folder, options: DiskOptions, journal: Journal) -> DiskStore:
        is_direct = options.direct is not Direct.NEVER and allows_direct(folder.system, folder.at(PROBE))
        if options.direct is Direct.ALWAYS and not is_direct:
            raise ValueError(
                f"{folder.path}: direct is {options.direct.value!r}, and this file system refuses O_DIRECT; choose a "
                "folder on a local drive, or direct='auto'"
            )
        bounce = Bounce()
        regions: dict[str, Region] = {}
        try:
            for entry in journal.entries:
                regions[entry.name] = _opened(folder, entry, journal.chunk_bytes, is_direct, bounce)
            holdings = Holdings.start(folder, regions, options.num_threads)
        except BaseException:
            close_files(regions)
            raise
        return cls(holdings, options, is_direct, journal, journal, bounce)

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(DiskError) if error else contextlib.nullcontext():
            self.close()

    @property
    def generation(self) -> int:
        """How many commits there were."""
        return self.journal.generation

    @property
    def regions(self) -> Mapping[str, Region]:
        """All regions by name, in the order in which they were allocated."""
        return MappingProxyType(self.holdings.regions)

    @property
    def allocated_bytes(self) -> int:
        """What the regions take on the disk, both slots of each."""
        return sum(2 * region.slot_bytes for region in self.regions.values())

    def allocate(self, name: str, num_bytes: int) -> Region:
        """A new region, with the room of both slots reserved; it lasts if something is committed.

        DiskFull, with needed and free bytes, when there is no room; ValueError for a name that is taken.
        """
        self._settle()
        if name in self.regions or num_bytes < 0:
            taken = f"region {name!r} is there already" if name in self.regions else f"{num_bytes} bytes"
            raise ValueError(f"{self.path}: {taken}; choose a new name and a size of 0 or more bytes")
        folder, calls = self.holdings.folder, self.holdings.folder.system
        path, slots = folder.at(folder.new_region_name()), 2 * padded(num_bytes)
        with naming(calls, f"allocate region {name!r}", path, slots):
            file = BlockFile.create(calls, path, slots, is_direct=self.is_direct, bounce=self.bounce)
        region = Region(name, num_bytes, file, self.options.chunk_bytes)
        self.holdings.regions[name] = region
        return region

    def buffer(self, num_bytes: int) -> Tensor:
        """(at least num_bytes,) uint8 on the CPU, zeros: memory that transfers need not copy."""
        return aligned(num_bytes)

    def read(self, region: Region, into: Tensor) -> Transfer:
        """Fill the first bytes of `into`, a contiguous CPU tensor of any dtype, with the newest values of the region.

        That is what was written last, committed or not.  Returns at once; `wait` on the result raises DiskCorrupt or
        DiskFailed, and nothing in `into` counts then.
        """
        self._check_usable()
        return self._submit(region, Direction.READ, into)

    def write(self, region: Region, source: Tensor) -> Transfer:
        """Write the first bytes of `source`, a contiguous CPU tensor of any dtype, to the slot that is not current.

        Returns at once; `source` must stay as it is until `wait` on the result has returned.  That raises DiskFull or
        DiskFailed, and so does `commit` if nobody waits.
        """
        self._settle()
        return self._submit(region, Direction.WRITE, source)

    def prepare(self) -> None:
        """Do all of a commit but its last step, a rename: what needs room or can be damaged has been done then.

        Stores that are to commit together, or not at all, prepare, agree, and then commit.  Raises as `commit` does.
        """
        self._settle()
        self.holdings.traffic.drain()
        self._raise_failures()
        regions = tuple(region.entry() for region in self.regions.values())
        journal = Journal(self.generation + 1, self.options.chunk_bytes, regions)
        if regions == self.journal.entries:
            self.next_journal = self.journal
            return
        self._sync_written()
        if journal != self.next_journal:
            self.next_journal = self.journal
            folder = self.holdings.folder
            with naming(folder.system, f"commit generation {journal.generation}", folder.path):
                folder.write_next(journal, durable=self.options.durable)
            self.next_journal = journal

    def commit(self) -> int:
        """Make all that was written current, or nothing of it; the generation.

        Waits for what is under way.  Raises the first error that nobody has heard of, or that left a region half
        written; then, and when the commit itself fails, what was written stays uncommitted: mend it and commit again,
        or `discard`.  After an error in the very last step, the rename, the next call finds out what became of it.
        """
        self.prepare()
        if self.next_journal is not self.journal:
            folder = self.holdings.folder
            with naming(folder.system, f"commit generation {self.next_journal.generation}", folder.path):
                self.phase = Phase.UNSURE
                folder.publish_next(durable=self.options.durable)
            self._adopt()
        return self.generation

    def discard(self) -> None:
        """Forget what was written since the last commit, failures too; regions stay allocated."""
        self._settle()
        self.holdings.traffic.drain()
        self.holdings.traffic.forget_writes()
        self.next_journal = self.journal
        for region in self.regions.values():
            region.forget()

    def close(self, *, remove: bool = False) -> None:
        """End the threads, close the files, give up the folder, and remove it if that is wanted; once.

        What was not committed is lost, and what is under way is cut off.  Raises the first error that nobody has
        heard of.
        """
        if self.phase is Phase.CLOSED:
            return
        self.phase = Phase.CLOSED
        if remove:
            self.holdings.at_end = AtEnd.REMOVE
        self.release()
        if error := self.holdings.first_error():
            raise error

    @property
    def path(self) -> str:
        """The folder."""
        return self.holdings.folder.path

    def _submit(self, region: Region, direction: Direction, tensor: Tensor) -> Transfer:
        if self.regions.get(region.name) is not region:
            raise ValueError(
                f"{self.path}: region {region.name!r} belongs to another store; this one has {[*self.regions]}"
            )
        transfer = Transfer(region, direction, Memory.of(tensor, region.num_bytes))
        self.holdings.traffic.submit(transfer)
        return transfer

    def _raise_failures(self) -> None:
        torn = (region.failure for region in self.regions.values() if region.pending is Pending.TORN)
        if error := self.holdings.traffic.take_untold() or next(torn, None):
            raise error

    def _sync_written(self) -> None:
        """The regions' bytes and names are on the medium; a region whose bytes may not be is torn."""
        if not self.options.durable:
            return
        known = {entry.name for entry in self.journal.entries}
        written = [
            each for each in self.regions.values() if each.pending is Pending.WRITTEN or each.name not in known
        ]
        errors = self.holdings.workers.run_all([region.file.sync for region in written])
        for region, error in zip(written, errors, strict=True):
            if error is not None:
                region.tear(error)
        self._raise_failures()
        if len(self.regions) != len(known):
            self.holdings.folder.sync()

    def _adopt(self) -> None:
        """The next journal is the journal; doing this twice, after an interrupt, is the same as once."""
        for entry in self.next_journal.entries:
            self.regions[entry.name].adopt(entry)
        self.journal, self.phase = self.next_journal, Phase.OPEN

    def _settle(self) -> None:
        """Find out what became of a commit that was not seen through."""
        self._check_usable()
        if self.phase is Phase.UNSURE:
            folder = self.holdings.folder
            with naming(folder.system, "find out what is committed", folder.path):
                found = folder.read_journal()
                if self.options.durable:
                    folder.sync()
            if found.generation == self.next_journal.generation:
                self._adopt()
            self.next_journal, self.phase = self.journal, Phase.OPEN

    def _check_usable(self) -> None:
        if self.phase is Phase.CLOSED:
            raise DiskClosed(f"{self.path}: the store is closed; open() it again", self.path)
        if self.holdings.is_elsewhere():
            raise DiskClosed(
                f"{self.path}: the store belongs to process {self.holdings.owner_pid}, of which this one, "
                f"{os.getpid()}, is a fork; use it there",
                self.path,
            )


def _opened(folder: Folder, entry: Entry, chunk_bytes: int, is_direct: bool, bounce: Bounce) -> Region:
    """The region as it was committed; DiskCorrupt if its file is gone or too short."""
    path, wanted = folder.at(entry.file), 2 * padded(entry.num_bytes)
    try:
        file = BlockFile.open(folder.system, path, is_direct=is_direct, bounce=bounce)
    except FileNotFoundError:
        raise DiskCorrupt(path, entry.name, 0, f"a file of {wanted:,} bytes", "none") from None
    found = folder.system.num_bytes(file.fd)
    if found < wanted:
        file.close()
        raise DiskCorrupt(path, entry.name, found, f"a file of {wanted:,} bytes", f"one of {found:,}")
    region = Region(entry.name, entry.num_bytes, file, chunk_bytes)
    region.adopt(entry)
    return region


def _lock_existing(system: System, path: str) -> Folder:
    """The folder of a store that nobody has open; DiskMissing if there is none."""
    missing = DiskMissing(f"{path}: there is no store; DiskStore.create() makes one", path)
    try:
        if JOURNAL not in system.names(path):
            raise missing
    except (FileNotFoundError, NotADirectoryError):
        raise missing from None
    return Folder.lock(system, path)


@contextlib.contextmanager
def _unlocking_on_error(folder: Folder) -> Iterator[None]:
    try:
        yield
    except BaseException:
        folder.unlock()
        raise
