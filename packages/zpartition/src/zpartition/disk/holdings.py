"""What a store holds of the system, and how it is given back.

Apart from the store, so that it can be given back when a store is dropped without `close`, or the interpreter ends:
nothing here refers to the store.  The last thread to leave closes the files, since whoever drops the store may be one
of them (a garbage collection inside a job), and cannot wait for itself.
"""

from __future__ import annotations

import contextlib
import enum
import os
from typing import final

import attrs

from .files import naming
from .folder import Folder
from .region import Region
from .traffic import Traffic
from .workers import Workers


class AtEnd(enum.Enum):
    """What becomes of the files."""

    KEEP = "keep"  # `open` finds the last commit
    REMOVE = "remove"


@final
@attrs.define(eq=False)
class Holdings:
    """Folder, open files and threads of a store."""

    folder: Folder
    workers: Workers
    traffic: Traffic
    regions: dict[str, Region]
    at_end: AtEnd = AtEnd.KEEP
    errors: list[BaseException] = attrs.field(factory=list)  # of giving back
    owner_pid: int = attrs.field(factory=os.getpid)

    @classmethod
    def start(cls, folder: Folder, regions: dict[str, Region], num_threads: int) -> Holdings:
        """Start the threads; from now on they give the rest back."""
        made: list[Holdings] = []
        workers = Workers.start(num_threads, lambda: made[0].let_go())
        made.append(cls(folder, workers, Traffic(workers), regions))
        return made[0]

    def is_elsewhere(self) -> bool:
        """Whether this process is a fork of the one that they belong to: it has the files and not the threads."""
        return os.getpid() != self.owner_pid

    def give_back(self) -> None:
        """Cut off what is under way and end the threads."""
        if not self.is_elsewhere():
            self.traffic.cancel(self.folder.path)
            self.workers.stop()

    def let_go(self) -> None:
        """Close the files, remove them if that is wanted, and give up the folder; by the last thread."""
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(self.folder.unlock)
                close_files(self.regions)
                if self.at_end is AtEnd.REMOVE:
                    with naming(self.folder.system, "remove the store", self.folder.path):
                        self.folder.clear()
        except BaseException as error:  # told by `close`
            self.errors.append(error)

    def first_error(self) -> BaseException | None:
        """That nobody has heard of."""
        untold = self.traffic.take_untold()
        return untold or next(iter(self.errors), None)


def close_files(regions: dict[str, Region]) -> None:
    """All of them, whatever happens to one."""
    with contextlib.ExitStack() as stack:
        for region in regions.values():
            stack.callback(region.file.close)
