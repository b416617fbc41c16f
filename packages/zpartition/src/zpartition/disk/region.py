"""A region: a named stretch of bytes with two slots.

One slot is current, that is what was committed last.  Writes go to the other one, so that what was committed can be
read whatever becomes of them.  A commit makes the other slot current; then the roles are swapped.

    NONE     nothing was written since the last commit; reads see the current slot
    TORN     a write of the other slot has begun and is not done, or has failed: there is nothing to commit
    WRITTEN  the other slot is whole; reads see it
"""

from __future__ import annotations

import enum
import os
from collections import deque
from threading import Lock
from typing import TYPE_CHECKING, final

import attrs

from .errors import DiskError
from .files import BlockFile
from .journal import NO_SLOT, Entry, num_chunks
from .memory import padded

if TYPE_CHECKING:
    from .transfer import Transfer


class Pending(enum.Enum):
    """What the slot that is not current holds."""

    NONE = "none"
    TORN = "torn"
    WRITTEN = "written"


@final
@attrs.define(eq=False)
class Region:
    """`name` and `num_bytes` are for everybody, the rest is the store's.

    Invariant: transfers of one region run one after the other, in the order in which they were asked for; so a read
    sees the write before it, and `pending` changes only at the ends of a transfer or while none is under way.
    """

    name: str
    num_bytes: int
    file: BlockFile  # slot 0 at 0, slot 1 at slot_bytes
    chunk_bytes: int
    current: int = NO_SLOT  # the committed slot
    pending: Pending = Pending.NONE
    checksums: list[list[int]] = attrs.field(factory=lambda: [[], []])  # of each slot: crc32 of each chunk
    failure: BaseException | None = None  # why it is TORN
    line: deque[Transfer] = attrs.field(factory=deque)  # the first one is under way
    lock: Lock = attrs.field(factory=Lock)  # of the line

    @property
    def slot_bytes(self) -> int:
        """The room of one slot."""
        return padded(self.num_bytes)

    @property
    def other(self) -> int:
        """The slot that writes go to."""
        return 0 if self.current == NO_SLOT else 1 - self.current

    def begin_read(self) -> int:
        """The slot to read; DiskError if there is none to rely on."""
        if self.pending is Pending.TORN:
            raise DiskError(
                f"{self.file.path}: the last write of region {self.name!r} failed ({self.failure}); write it "
                "again, or discard() to return to what was committed",
                self.file.path,
            )
        slot = self.other if self.pending is Pending.WRITTEN else self.current
        if slot == NO_SLOT:
            raise DiskError(
                f"{self.file.path}: region {self.name!r} holds nothing: it was never written, or what was written "
                "was discarded; write it first",
                self.file.path,
            )
        return slot

    def begin_write(self) -> int:
        """The slot to write."""
        self.pending, self.failure = Pending.TORN, None
        self.checksums[self.other] = [0] * num_chunks(self.num_bytes, self.chunk_bytes)
        return self.other

    def end_write(self, failure: BaseException | None) -> None:
        """All chunks are written, or one could not be."""
        self.failure = failure
        if failure is None:
            self.pending = Pending.WRITTEN

    def tear(self, failure: BaseException) -> None:
        """What was written may not have reached the medium."""
        self.pending, self.failure = Pending.TORN, failure

    def forget(self) -> None:
        """Nothing was written since the last commit."""
        self.pending, self.failure = Pending.NONE, None

    def entry(self) -> Entry:
        """How the journal would have it, with what was written made current."""
        slot = self.other if self.pending is Pending.WRITTEN else self.current
        sums = () if slot == NO_SLOT else tuple(self.checksums[slot])
        return Entry(self.name, os.path.basename(self.file.path), self.num_bytes, slot, sums)

    def adopt(self, entry: Entry) -> None:
        """The journal has it so; doing this twice is the same as once."""
        self.current = entry.slot
        if entry.slot != NO_SLOT:
            self.checksums[entry.slot] = list(entry.checksums)
        self.forget()
