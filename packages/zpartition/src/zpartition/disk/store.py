"""A store of bytes on disk, for optimizer states and weights that do not fit into memory.

Problem.  A training step reads some gigabytes, updates them and writes them back.  A write takes long and can fail
half-way, and the values that it replaces exist nowhere else; a half-written step is no step at all.

Design.  Every region has two slots.  Writes go to the slot that is not current, and `commit` makes all writes current
at once by renaming a small journal (folder.py has the order of operations).  So after any failure (an exception, a
full disk, kill -9, a power failure) the last committed step is intact.  The price is twice the room; no copy is ever
made.  Transfers are asynchronous: a thread pool issues preads and pwrites, by default past the page cache (O_DIRECT),
which would otherwise fill with the data that were to stay out of memory.  Every chunk has a checksum that is verified
on each read.

A store belongs to one process; a folder belongs to one store.  A store knows bytes and files, and nothing of ranks.

Rejected: libaio and io_uring, a compiled extension or a library to install, for what four threads do at the drive's
speed.  mmap, where an error of the drive is a signal that kills the process.  Writing in place with an undo log,
which writes every byte twice and needs a repair before anything can be read.  One file for all regions, since
buffered transfers to one file are written by one thread at a time.
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

from zpartition.disk.errors import DiskClosed, DiskCorrupt, DiskError, DiskExists, DiskMissing
from zpartition.disk.files import BlockFile, allows_direct, translate_os_errors
from zpartition.disk.folder import JOURNAL, PROBE, Folder
from zpartition.disk.journal import Journal, RegionEntry
from zpartition.disk.memory import ALIGNMENT, BounceBuffer, MemorySpan, aligned_buffer, padded
from zpartition.disk.region import Direction, Pending, Region, Transfer
from zpartition.disk.resources import OnClose, StoreResources, close_files
from zpartition.disk.system import System


class Direct(enum.Enum):
    """Use of O_DIRECT, which bypasses the page cache."""

    AUTO = "auto"  # if a probe shows that the file system supports it
    ALWAYS = "always"  # reject a folder that does not support it
    NEVER = "never"  # through the page cache, which then holds the data that were to stay out of memory


def _is_multiple(_: object, field: attrs.Attribute[int], value: int) -> None:
    if not ALIGNMENT <= value <= 1 << 30 or value % ALIGNMENT:
        raise ValueError(f"{field.name} is {value:,}; it must be a multiple of {ALIGNMENT:,}, and at most 1 GiB")


@attrs.frozen(kw_only=True)
class DiskOptions:
    """Options of a store; the defaults suit one NVMe drive."""

    num_threads: int = attrs.field(default=8, validator=attrs.validators.ge(1))  # calls in flight, per store
    direct: Direct = attrs.field(default=Direct.AUTO, converter=Direct)
    durable: bool = True  # commits survive a power failure (fsync); False: only the death of the process
    chunk_bytes: int = attrs.field(default=1 << 20, validator=_is_multiple)  # of one call and of one checksum


DEFAULTS = DiskOptions()


class StoreState(enum.Enum):
    """State of the journal on disk, compared to the store in memory."""

    OPEN = "open"  # the same generation
    UNSURE = "unsure"  # a rename was interrupted: this generation or the next; resolved before the next write
    CLOSED = "closed"


@final
@attrs.define(eq=False)
class DiskStore:
    """Regions of bytes in the files of one folder; see the module's docstring.

    Create one with `create` or `open`.  Methods may be called from one thread only; any thread may wait for
    transfers.
    """

    resources: StoreResources  # folder, files and threads, to be released
    options: DiskOptions
    is_direct: bool  # transfers pass by the page cache
    journal: Journal  # the last commit
    next_journal: Journal  # journal.new, to be renamed; the same object if nothing is prepared
    bounce: BounceBuffer  # of all files: one chunk a thread
    state: StoreState = StoreState.OPEN
    finalizer: weakref.finalize[..., DiskStore] = attrs.field(init=False)  # releases the resources, once

    def __attrs_post_init__(self) -> None:
        self.finalizer = weakref.finalize(self, self.resources.shut_down)  # when the store is dropped, or by `close`

    @classmethod
    def create(
        cls, directory: str | os.PathLike[str], options: DiskOptions = DEFAULTS, *, system: System | None = None
    ) -> DiskStore:
        """Create an empty store.  The folder is created; use one for each rank, on the drive.

        Raises DiskBusy if another store has the folder open, DiskExists if it holds a store (open or remove that).
        """
        calls, path = system or System(), os.path.abspath(directory)
        with translate_os_errors(calls, "make the store's folder", path):
            calls.make_folder(path)
        folder = Folder.lock(calls, path)
        with _unlock_on_error(folder), translate_os_errors(calls, "make the store", path):
            if folder.has_journal():
                raise DiskExists(
                    f"{path}: the folder holds a store already; call DiskStore.open() to continue from its last "
                    "commit, or DiskStore.remove()",
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
        """Open an existing store at its last commit; later writes are removed.

        Checksums are verified on each read.  The chunk size is the one that the store was created with.

        Raises DiskMissing if there is no store, DiskBusy, DiskCorrupt, DiskFailed.
        """
        calls, path = system or System(), os.path.abspath(directory)
        folder = _lock_existing(calls, path)
        with _unlock_on_error(folder), translate_os_errors(calls, "open the store", path):
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
                with translate_os_errors(calls, "remove the store", path):
                    folder.clear()
            finally:
                folder.unlock()

    @classmethod
    def _start(cls, folder: Folder, options: DiskOptions, journal: Journal) -> DiskStore:
        is_direct = options.direct is not Direct.NEVER and allows_direct(folder.system, folder.at(PROBE))
        if options.direct is Direct.ALWAYS and not is_direct:
            raise ValueError(
                f"{folder.path}: direct is {options.direct.value!r}, but this file system does not support O_DIRECT; "
                "choose a folder on a local drive, or direct='auto'"
            )
        bounce = BounceBuffer()
        regions: dict[str, Region] = {}
        try:
            for entry in journal.entries:
                regions[entry.name] = _opened(folder, entry, journal.chunk_bytes, is_direct, bounce)
            resources = StoreResources.start(folder, regions, options.num_threads)
        except BaseException:
            close_files(regions)
            raise
        return cls(resources, options, is_direct, journal, journal, bounce)

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(DiskError) if error else contextlib.nullcontext():
            self.close()

    @property
    def generation(self) -> int:
        """Number of commits."""
        return self.journal.generation

    @property
    def regions(self) -> Mapping[str, Region]:
        """All regions by name, in order of allocation."""
        return MappingProxyType(self.resources.regions)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the regions take on disk, both slots of each."""
        return sum(2 * region.slot_bytes for region in self.regions.values())

    def allocate(self, name: str, num_bytes: int) -> Region:
        """Allocate a region and reserve the room of both slots; a commit makes it permanent.

        Raises DiskFull, with needed and free bytes, and ValueError for a name that is taken.
        """
        self._resolve_commit()
        if name in self.regions or num_bytes < 0:
            taken = f"region {name!r} exists" if name in self.regions else f"{num_bytes} bytes"
            raise ValueError(f"{self.path}: {taken}; choose a new name and a size of 0 or more bytes")
        folder, calls = self.resources.folder, self.resources.folder.system
        path, slots = folder.at(folder.new_region_name()), 2 * padded(num_bytes)
        with translate_os_errors(calls, f"allocate region {name!r}", path, slots):
            file = BlockFile.create(calls, path, slots, is_direct=self.is_direct, bounce=self.bounce)
        region = Region(name, num_bytes, file, self.options.chunk_bytes)
        self.resources.regions[name] = region
        return region

    def buffer(self, num_bytes: int) -> Tensor:
        """Allocate (at least num_bytes,) uint8 zeros on the CPU: memory that transfers use without a copy."""
        return aligned_buffer(num_bytes)

    def read(self, region: Region, into: Tensor) -> Transfer:
        """Start reading the newest values of `region`, committed or not, into the first bytes of `into`.

        `into` is a contiguous CPU tensor of any dtype.  `wait` on the result raises DiskCorrupt or DiskFailed; the
        contents of `into` are undefined then.
        """
        self._check_usable()
        return self._submit(region, Direction.READ, into)

    def write(self, region: Region, source: Tensor) -> Transfer:
        """Start writing the first bytes of `source`, a contiguous CPU tensor of any dtype, to the other slot.

        `source` must not change until `wait` on the result has returned.  `wait`, or else `commit`, raises DiskFull
        or DiskFailed.
        """
        self._resolve_commit()
        return self._submit(region, Direction.WRITE, source)

    def prepare(self) -> None:
        """Do all of a commit except its last step, the rename: everything that can fail for lack of room.

        Stores that commit together, or not at all, prepare, agree, and then commit.  Raises as `commit` does.
        """
        self._resolve_commit()
        self.resources.transfers.drain()
        self._raise_failures()
        regions = tuple(region.entry() for region in self.regions.values())
        journal = Journal(self.generation + 1, self.options.chunk_bytes, regions)
        if regions == self.journal.entries:
            self.next_journal = self.journal
            return
        self._sync_written()
        if journal != self.next_journal:
            self.next_journal = self.journal
            folder = self.resources.folder
            with translate_os_errors(folder.system, f"commit generation {journal.generation}", folder.path):
                folder.write_next(journal, durable=self.options.durable)
            self.next_journal = journal

    def commit(self) -> int:
        """Make all writes current, or none of them; returns the generation.

        Waits for transfers in flight.  Raises the first error that was not reported, or that left a region half
        written.  After that, or if the commit itself fails, the writes stay uncommitted: fix the cause and commit
        again, or `discard`.  After an error in the last step, the rename, the next call finds out if it took effect.
        """
        self.prepare()
        if self.next_journal is not self.journal:
            folder = self.resources.folder
            with translate_os_errors(folder.system, f"commit generation {self.next_journal.generation}", folder.path):
                self.state = StoreState.UNSURE
                folder.publish_next(durable=self.options.durable)
            self._adopt()
        return self.generation

    def discard(self) -> None:
        """Drop all writes since the last commit, failed ones too; regions stay allocated."""
        self._resolve_commit()
        self.resources.transfers.drain()
        self.resources.transfers.drop_write_errors()
        self.next_journal = self.journal
        for region in self.regions.values():
            region.reset()

    def close(self, *, remove: bool = False) -> None:
        """Stop the threads, close the files, unlock the folder, and remove it if `remove`; idempotent.

        Uncommitted writes are lost, and transfers in flight are cancelled.  Raises the first error that was not
        reported.
        """
        if self.state is StoreState.CLOSED:
            return
        self.state = StoreState.CLOSED
        if remove:
            self.resources.on_close = OnClose.REMOVE
        self.finalizer()
        if error := self.resources.first_error():
            raise error

    @property
    def path(self) -> str:
        """The folder."""
        return self.resources.folder.path

    def _submit(self, region: Region, direction: Direction, tensor: Tensor) -> Transfer:
        if self.regions.get(region.name) is not region:
            raise ValueError(
                f"{self.path}: region {region.name!r} belongs to another store; this one has {[*self.regions]}"
            )
        transfer = Transfer(region, direction, MemorySpan.of(tensor, region.num_bytes))
        self.resources.transfers.submit(transfer)
        return transfer

    def _raise_failures(self) -> None:
        torn = (region.failure for region in self.regions.values() if region.pending is Pending.TORN)
        if error := self.resources.transfers.pop_unreported() or next(torn, None):
            raise error

    def _sync_written(self) -> None:
        """Flush bytes and names of the written regions; a region that fails to sync is marked torn."""
        if not self.options.durable:
            return
        known = {entry.name for entry in self.journal.entries}
        written = [
            each for each in self.regions.values() if each.pending is Pending.WRITTEN or each.name not in known
        ]
        errors = self.resources.pool.run_all([region.file.sync for region in written])
        for region, error in zip(written, errors, strict=True):
            if error is not None:
                region.mark_torn(error)
        self._raise_failures()
        if len(self.regions) != len(known):
            self.resources.folder.sync()

    def _adopt(self) -> None:
        """Make the next journal the current one; idempotent, for a call after an interrupt."""
        for entry in self.next_journal.entries:
            self.regions[entry.name].adopt(entry)
        self.journal, self.state = self.next_journal, StoreState.OPEN

    def _resolve_commit(self) -> None:
        """Find out if an interrupted commit took effect."""
        self._check_usable()
        if self.state is StoreState.UNSURE:
            folder = self.resources.folder
            with translate_os_errors(folder.system, "find out what is committed", folder.path):
                found = folder.read_journal()
                if self.options.durable:
                    folder.sync()
            if found.generation == self.next_journal.generation:
                self._adopt()
            self.next_journal, self.state = self.journal, StoreState.OPEN

    def _check_usable(self) -> None:
        if self.state is StoreState.CLOSED:
            raise DiskClosed(f"{self.path}: the store is closed; open() it again", self.path)
        if self.resources.is_forked():
            raise DiskClosed(
                f"{self.path}: the store belongs to process {self.resources.owner_pid}, of which this one, "
                f"{os.getpid()}, is a fork; use it there",
                self.path,
            )


def _opened(folder: Folder, entry: RegionEntry, chunk_bytes: int, is_direct: bool, bounce: BounceBuffer) -> Region:
    """Open a committed region.  Raises DiskCorrupt if its file is missing or too short."""
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
    """Lock the folder of an existing store.  Raises DiskMissing."""
    missing = DiskMissing(f"{path}: there is no store; DiskStore.create() makes one", path)
    try:
        if JOURNAL not in system.names(path):
            raise missing
    except (FileNotFoundError, NotADirectoryError):
        raise missing from None
    return Folder.lock(system, path)


@contextlib.contextmanager
def _unlock_on_error(folder: Folder) -> Iterator[None]:
    try:
        yield
    except BaseException:
        folder.unlock()
        raise
