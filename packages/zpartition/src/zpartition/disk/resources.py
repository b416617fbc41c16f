"""System resources of a store: folder lock, open files and threads, and their release.

They are separate from the store, and hold no reference to it, so that they are released when a store is dropped
without `close` or the interpreter exits.  The last thread to exit closes the files: the store may be dropped on one
of these threads (garbage collection inside a job), which cannot wait for itself.
"""

from __future__ import annotations

import contextlib
import enum
import os
from typing import final

import attrs

from zpartition.disk.files import translate_os_errors
from zpartition.disk.folder import Folder
from zpartition.disk.region import Region
from zpartition.disk.transfer_queue import ThreadPool, TransferQueue


class OnClose(enum.Enum):
    """Fate of the files when a store is closed."""

    KEEP = "keep"  # `open` finds the last commit
    REMOVE = "remove"


@final
@attrs.define(eq=False)
class StoreResources:
    """Folder, open files and threads of a store."""

    folder: Folder
    pool: ThreadPool
    transfers: TransferQueue
    regions: dict[str, Region]
    on_close: OnClose = OnClose.KEEP
    errors: list[BaseException] = attrs.field(factory=list)  # of `release`
    owner_pid: int = attrs.field(factory=os.getpid)

    @classmethod
    def start(cls, folder: Folder, regions: dict[str, Region], num_threads: int) -> StoreResources:
        """Start the threads, which own the other resources from now on."""
        made: list[StoreResources] = []
        pool = ThreadPool.start(num_threads, lambda: made[0].release())
        made.append(cls(folder, pool, TransferQueue(pool), regions))
        return made[0]

    def is_forked(self) -> bool:
        """Check if this process is a fork of the owner: it has the files but not the threads."""
        return os.getpid() != self.owner_pid

    def shut_down(self) -> None:
        """Cancel transfers in flight and stop the threads."""
        if not self.is_forked():
            self.transfers.cancel(self.folder.path)
            self.pool.stop()

    def release(self) -> None:
        """Close the files, remove them if requested, and unlock the folder.  The last thread calls it."""
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(self.folder.unlock)
                close_files(self.regions)
                if self.on_close is OnClose.REMOVE:
                    with translate_os_errors(self.folder.system, "remove the store", self.folder.path):
                        self.folder.clear()
        except BaseException as error:  # raised by `close`
            self.errors.append(error)

    def first_error(self) -> BaseException | None:
        """Return the first error that has not been reported."""
        unreported = self.transfers.pop_unreported()
        return unreported or next(iter(self.errors), None)


def close_files(regions: dict[str, Region]) -> None:
    """Close all files, even if closing one of them fails."""
    with contextlib.ExitStack() as stack:
        for region in regions.values():
            stack.callback(region.file.close)
