"""Writers of checkpoints: synchronously, or in the background.

A background save blocks the loop while this rank's tensors are copied; then a thread writes, and votes with the
threads of other ranks over its own group.  Its errors are raised on all ranks together: at the next boundary after
every rank's thread has ended, at the next save or load, and at close.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

import attrs

if TYPE_CHECKING:
    import zckpt

__all__ = ["BackgroundSaver", "BlockingSaver", "Content", "Saver"]


@attrs.frozen
class Content:
    """Content of a checkpoint, as zckpt.save takes it."""

    shards: Iterable[zckpt.ShardLike]
    objects: Mapping[str, Any]
    rank_objects: Mapping[str, Any]
    step: int
    latest: bool
    keep: zckpt.RetentionPolicy

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of zckpt.save."""
        return {**attrs.asdict(self, recurse=False), "overwrite": True}


class Saver(Protocol):
    """Writes checkpoints."""

    def save(self, root: str, tag: str, content: Content, peers: zckpt.Peers) -> str:
        """Save; return the checkpoint's folder.  All ranks call."""

    def check(self) -> None:
        """Raise the error of a failed background save on all ranks together; never waits for a disk."""

    def wait(self) -> None:
        """Wait until no save is running; raise the error of the last one."""

    def newest(self, peers: zckpt.Peers) -> zckpt.MemoryCheckpoint:
        """Return the newest save's copy in memory; raise ValueError if there is none.  All ranks call."""

    def close(self) -> None:
        """Wait, and free the copies."""


@final
@attrs.frozen(eq=False)
class BlockingSaver:
    """Saver that returns when the checkpoint is durable."""

    write: Callable[..., Path]  # zckpt.save

    def save(self, root: str, tag: str, content: Content, peers: zckpt.Peers) -> str:
        return str(self.write(root, tag, peers=peers, **content.options()))

    def check(self) -> None: ...

    def wait(self) -> None: ...

    def newest(self, peers: zckpt.Peers) -> zckpt.MemoryCheckpoint:
        raise ValueError(
            "restore_from_memory() needs the copy of a background save, and saves of this engine keep none: set "
            '"checkpoint": {"async_save": true}, or use load_checkpoint()'
        )

    def close(self) -> None: ...


@final
@attrs.define(eq=False)
class BackgroundSaver:
    """Saver that returns when a copy in memory is made.

    Invariant: `pending` is the same save on all ranks, or None on all.
    """

    saver: zckpt.AsyncSaver
    agree: Callable[[bool], bool]  # returns True if the value is True on all ranks
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
            raise ValueError("restore_from_memory() needs an earlier save_checkpoint(), and there was none")
        return self.saver.newest.checkpoint(peers)

    def close(self) -> None:
        self.pending = None
        self.saver.close()
