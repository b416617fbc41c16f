"""Saving behind the back of the training: a copy now, the disk later.

`save` copies this rank's tensors into host memory (pinned, if they are on a GPU) and returns; a thread of its own
then does what zckpt.save does, votes and all, from the copy.  The loop is blocked for the copy alone: nothing is
exchanged with other ranks before the thread runs, and the memory is kept from save to save, as fresh memory costs
more than the copy does.

What goes wrong then has nobody to tell, so it waits: the next `save`, `check`, `wait` or `close` raises it, once.  If
none of them ever comes, a warning says it when the handle goes or the program ends.
A second save waits for the first, or is refused if that is asked for; the latter only in a world of one, since ranks
end at different moments, and one that refuses would leave the others waiting for it.  Each save is a thread that is
no daemon: a program that ends finishes what it has begun to save.

The copy is also the newest state in memory: `SaveHandle.restore` puts it back after a step that went wrong.

Rejected: a second process (the state crosses over by another copy, and dies with its parent anyway), and a queue of
saves (memory for two states, to no end: a disk that is slower than the saves stays behind).
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import attrs
import torch
from torch import Tensor

from zckpt.errors import CheckpointError, CheckpointInputError, CheckpointWarning
from zckpt.format import canonical
from zckpt.format.canonical import JSON
from zckpt.format.regions import Box, Span
from zckpt.format.shard import ShardLike, check_shard, shape_of
from zckpt.loading.memory import MemoryCheckpoint
from zckpt.ranks import ALONE, Peers
from zckpt.saving.plan import SaveRequest
from zckpt.saving.retention import KEEP_ALL, RetentionPolicy
from zckpt.saving.save import SaveContent, SaveJob, run_save
from zckpt.sources.views import VIEWS_KEY, Tensors, targets
from zckpt.storage.storage import LOCAL, Storage

_ALIGN_NBYTES = 64


class WhenBusy(enum.Enum):
    """Behavior of a save while the previous one is still being written."""

    WAIT = "wait"
    REFUSE = "refuse"  # CheckpointInputError; in a world of one


@final
@attrs.define(eq=False)
class SaveHandle:
    """One save under way, or over."""

    job: SaveJob  # with copies in the place of the tensors
    live: Sequence[ShardLike]  # what was given as shards; the order's first copies are theirs
    thread: threading.Thread | None = None  # None: not begun
    path: Path | None = None  # once it is durable
    error: BaseException | None = None  # what came instead; raised once by whoever asks first
    holds_copy: bool = True  # False once a later save has taken the memory
    unreported: list[str] = attrs.field(factory=list)  # the error in words, until it is raised

    def __attrs_post_init__(self) -> None:
        weakref.finalize(self, _warn_unreported, self.job.request.tag, self.unreported)

    @property
    def done(self) -> bool:
        """True once the save has ended, successfully or not."""
        return self.thread is not None and not self.thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> Path:
        """The checkpoint's folder, once it is durable; its error, if it failed; TimeoutError after `timeout_s`."""
        if self.thread is not None:
            self.thread.join(timeout_s)
        if not self.done:
            raise TimeoutError(f"the save of {self.job.request.tag!r} is not done after {timeout_s} s")
        self.check()
        if self.path is None:
            raise CheckpointError(f"the save of {self.job.request.tag!r} failed; its error was raised before")
        return self.path

    def check(self) -> None:
        """Raise the error of a save that failed, if nobody was told yet; never waits."""
        if self.done and self.error is not None:  # done first: the thread sets the error, and nobody else after it
            error, self.error = self.error, None
            self.unreported.clear()
            raise error

    def restore(self) -> None:
        """Copy the state as it was saved back into the tensors it came from, whether the disk has it yet or not.

        CheckpointInputError if a later save has taken the memory.
        """
        if not self.holds_copy:
            raise self._overwritten_error()
        kept = {shard.name: shard for shard in self.job.shards}
        kinds = {name: (shard.tensor.dtype, shape_of(shard)) for name, shard in kept.items()}
        restore = targets(self.job.tensors, self.job.objects.get(VIEWS_KEY), kinds, optimizer=True)
        with torch.no_grad():
            for live, copy in zip(self.live, self.job.shards):
                live.tensor.copy_(copy.tensor)
            for live in restore.shards:
                live.tensor.copy_(kept[live.name].tensor)
        restore.commit()
        _synchronize([copy.tensor for copy in (*self.live, *restore.shards)])

    def checkpoint(self, peers: Peers = ALONE) -> MemoryCheckpoint:
        """The copy as a checkpoint to be read by the ranks that saved it, whether the disk has it yet or not.

        CheckpointInputError if a later save has taken the memory.
        """
        if not self.holds_copy:
            raise self._overwritten_error()
        request = self.job.request
        shards, objects, mine = self.job.shards, dict(self.job.objects), dict(self.job.rank_objects)
        return MemoryCheckpoint.of(shards, objects, mine, tag=request.tag, step=request.step, peers=peers)

    def _overwritten_error(self) -> CheckpointInputError:
        return CheckpointInputError(
            f"the copy of {self.job.request.tag!r} is gone: a later save has its memory. Restore that one."
        )

    @property
    def objects(self) -> dict[str, JSON]:
        """The objects as they were saved."""
        return {key: value for key, value in self.job.objects.items() if key != VIEWS_KEY}

    @property
    def rank_objects(self) -> dict[str, JSON]:
        """This rank's objects as they were saved."""
        return dict(self.job.rank_objects)


@final
@attrs.define(eq=False)
class AsyncSaver:
    """Saves in the background, one at a time.  Close it, or use it as a context manager.

    `peers` is used from the background thread: give it ranks that nothing else talks through meanwhile, such as
    `group_peers` of a process group of its own.
    """

    peers: Peers = ALONE
    when_busy: WhenBusy = attrs.field(default=WhenBusy.WAIT, converter=WhenBusy)
    newest: SaveHandle | None = attrs.field(init=False, default=None)
    memory: HostMemory = attrs.field(init=False, factory=lambda: HostMemory())

    def __attrs_post_init__(self) -> None:
        if self.when_busy is WhenBusy.REFUSE and self.peers.world_size > 1:
            raise CheckpointInputError(
                f'when_busy="refuse" in a world of {self.peers.world_size}: ranks end at different moments, so one '
                'would refuse while others begin. Use when_busy="wait".'
            )

    def save(
        self,
        root: str | os.PathLike[str],
        tag: str | None = None,
        *,
        shards: Iterable[ShardLike] = (),
        tensors: Tensors = (),
        objects: Mapping[str, JSON] = {},
        rank_objects: Mapping[str, JSON] = {},
        step: int = 0,
        latest: bool = True,
        overwrite: bool = False,
        writers: int = 2,
        keep: RetentionPolicy = KEEP_ALL,
        storage: Storage = LOCAL,
    ) -> SaveHandle:
        """Like zckpt.save, but returns when the tensors are copied and may change.  Every rank calls it alike.

        Raises what an earlier save died of, if nobody was told; then nothing is begun.
        """
        self._wait_for_previous()
        request = SaveRequest.of(tag, step, latest=latest, overwrite=overwrite, writers=writers)
        job = SaveJob.of(root, request, SaveContent(shards, tensors, objects, rank_objects), keep, storage)
        if self.newest is not None:
            self.newest.holds_copy = False
        handle = SaveHandle(job, job.shards[: job.num_given])
        self._copy(handle)
        go = threading.Event()  # or the thread would take its first turns while the caller waits to return
        thread = threading.Thread(target=_run, args=(handle, self.peers, go), name="zckpt-save")
        thread.start()
        handle.thread, self.newest = thread, handle  # not before: one that did not begin is nothing to wait for
        go.set()
        return handle

    def check(self) -> None:
        """Raise what the last save died of, if nobody was told yet; never waits."""
        if self.newest is not None:
            self.newest.check()

    def wait(self) -> None:
        """Until no save is under way; raises what the last one died of, if nobody was told yet."""
        if self.newest is not None and self.newest.thread is not None:
            self.newest.thread.join()
            self.newest.check()

    def close(self) -> None:
        """Wait, free the memory, and raise what was not told."""
        try:
            self.wait()
        finally:
            if self.newest is not None:
                self.newest.holds_copy = False
                self.newest.job = attrs.evolve(self.newest.job, shards=())
            self.memory = HostMemory()

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            self.close()
        except Exception as error:
            if kind is None:
                raise
            warnings.warn(f"a background save failed too: {error}", CheckpointWarning, stacklevel=2)

    def _wait_for_previous(self) -> None:
        if self.newest is not None and not self.newest.done and self.when_busy is WhenBusy.REFUSE:
            raise CheckpointInputError(
                f"the save of {self.newest.job.request.tag!r} is not done: wait() for it, or use "
                'AsyncSaver(when_busy="wait")'
            )
        self.wait()

    def _copy(self, handle: SaveHandle) -> None:
        """Put copies into the order; what went wrong is for all ranks to hear, so it is not raised here."""
        try:
            job = handle.job
            handle.job = attrs.evolve(
                job,
                shards=self.memory.copies(job.shards),
                objects=canonical.plain(dict(job.objects), "objects"),
                rank_objects=canonical.plain(dict(job.rank_objects), "rank_objects"),
            )
        except Exception as error:
            handle.holds_copy = False
            handle.job = attrs.evolve(handle.job, error=error)


def save_async(
    root: str | os.PathLike[str],
    tag: str | None = None,
    *,
    saver: AsyncSaver | None = None,
    peers: Peers = ALONE,
    **options: Any,
) -> SaveHandle:
    """`AsyncSaver.save` with its options; without a saver it is a save of its own, and its memory the handle's."""
    return (saver or AsyncSaver(peers)).save(root, tag, **options)


def _run(handle: SaveHandle, peers: Peers, go: threading.Event) -> None:
    """The background thread."""
    go.wait()
    try:
        handle.path = run_save(handle.job, peers)
    except BaseException as error:
        handle.error = error
        handle.unreported.append(f"{type(error).__name__}: {error}")


def _warn_unreported(tag: str, unreported: list[str]) -> None:
    """Of a handle that is gone."""
    if unreported:
        text = f"the background save of {tag!r} failed, and nobody asked how it went: {unreported[0]}"
        warnings.warn(text, CheckpointWarning, stacklevel=2)


@final
@attrs.define(eq=False)
class HostMemory:
    """One stretch of memory for the copies of all tensors, kept while it is large enough."""

    data: Tensor = attrs.field(factory=lambda: torch.empty(0, dtype=torch.uint8))

    def copies(self, shards: Sequence[ShardLike]) -> list[ShardLike]:
        """The shards with copies of their tensors, valid until the next call."""
        sizes = [-(-shard.tensor.nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES for shard in shards]
        tensors = [shard.tensor.detach() for shard in shards]
        if len(self.data) < sum(sizes):
            self.data = _allocate(sum(sizes), pinned=any(each.is_cuda for each in tensors))
        made: list[ShardLike] = []
        start = 0
        for shard, tensor, size in zip(shards, tensors, sizes, strict=True):
            if tensor.dim() != 1:
                check_shard(shard)  # says what is wrong; everything else the background will
            room = self.data[start : start + tensor.nbytes].view(tensor.dtype)
            room.copy_(tensor, non_blocking=True)
            made.append(_CopiedShard(shard.name, shard.global_shape, shard.box, shard.span, room))
            start += size
        _synchronize(tensors)
        return made


@final
@attrs.frozen(eq=False)
class _CopiedShard:
    """A copy of a shard that was checked."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    span: Span
    tensor: Tensor


def _allocate(nbytes: int, pinned: bool) -> Tensor:
    """(nbytes,) uint8; large pages where the system has them, as the first touch is what costs."""
    if pinned:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    room = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them says so only now
            room.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(room, dtype=torch.uint8)


def _synchronize(tensors: Sequence[Tensor]) -> None:
    """Until the copies from and to these tensors' devices are over."""
    for device in {each.device for each in tensors if each.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
