"""How a checkpoint gets to disk: while the caller waits, or behind his back.

In the background the loop is blocked for a copy of this rank's tensors; a thread writes and votes with the other
ranks' threads over a group of its own.  What went wrong then is raised where all ranks can be told together: at the
next step's boundary once every rank's thread has ended, at the next save or load, and at close.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

import attrs

if TYPE_CHECKING:
    import zckpt

__all__ = ["Content", "SaveBehind", "SaveNow", "Saver"]


@attrs.frozen
class Content:
    """What is saved, as zckpt.save takes it."""

    shards: Iterable[zckpt.ShardLike]
    objects: Mapping[str, Any]
    rank_objects: Mapping[str, Any]
    step: int
    latest: bool
    keep: zckpt.RetentionPolicy

    def options(self) -> dict[str, Any]:
        """Keyword arguments."""
        return {**attrs.asdict(self, recurse=False), "overwrite": True}


class Saver(Protocol):
    """Takes checkpoints to disk."""

    def save(self, root: str, tag: str, content: Content, peers: zckpt.Peers) -> str:
        """The checkpoint's folder; all ranks call."""

    def check(self) -> None:
        """Raise what a save behind the caller's back has died of, on all ranks together; never waits for a disk."""

    def wait(self) -> None:
        """Until no save is under way; raises what the last one died of."""

    def newest(self, peers: zckpt.Peers) -> zckpt.MemoryCheckpoint:
        """The copy that the newest save has made in memory; ValueError if there is none.  All ranks call."""

    def close(self) -> None:
        """Wait, and free what is held."""


@final
@attrs.frozen(eq=False)
class SaveNow:
    """Returns when everything is durable."""

    write: Callable[..., Path]  # zckpt.save

    def save(self, root: str, tag: str, content: Content, peers: zckpt.Peers) -> str:
        return str(self.write(root, tag, peers=peers, **content.options()))

    def check(self) -> None: ...

    def wait(self) -> None: ...

    def newest(self, peers: zckpt.Peers) -> zckpt.MemoryCheckpoint:
        raise ValueError(
            "restore_from_memory() needs the copy of a background save, and saves of this engine keep none: write "
            '"checkpoint": {"async_save": true}, or use load_checkpoint()'
        )

    def close(self) -> None: ...


@final
@attrs.define(eq=False)
class SaveBehind:
    """Returns when a copy is made.

    Invariant: `pending` is the same save on all ranks, or None on all.
    """

    saver: zckpt.AsyncSaver
    agree: Callable[[bool], bool]  # whether it is True on all ranks
    pending: zckpt.SaveHandle | None = None

    def save(self, root: str, tag: str, content: Content, peers: zckpt.Peers) -> str:
        self.pending = None  # the saver waits for it, and raises its error
        self.pending = self.saver.save(root, tag, **content.options())
        return os.path.join(root, tag)

    def check(self) -> None:
        if self.pending is not None and self.agree(self.pending.done):
            handle, self.pending = self.pending, None
            handle.check()

    def wait(self) -> None:
        self.pending = None
        self.saver.wait()

    def newest(self, peers: zckpt.Peers) -> zckpt.MemoryCheckpoint:
        if self.saver.newest is None:
            raise ValueError("restore_from_memory() needs a save_checkpoint() before it, and there was none")
        return self.saver.newest.checkpoint(peers)

    def close(self) -> None:
        self.pending = None
        self.saver.close()
