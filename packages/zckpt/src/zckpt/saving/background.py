"""Background saves: copy the state now, write it in a thread.

`save` copies this rank's tensors into host memory (pinned, if they are on a GPU) and returns.  A thread then does
what zckpt.save does from the copy, including the votes.  Only the copy blocks the training loop: the thread does all
communication, and the host memory is reused from save to save, as allocating it costs more than the copy.

The next `save`, `check`, `wait` or `close` raises an error of the thread, once.  If none is called, a warning reports
it when the handle is deleted or the program ends.
A second save waits for the first.  `WhenBusy.REFUSE` raises instead, in a world of one only: ranks finish at
different times, and a rank that raises would leave the others waiting.  The thread is not a daemon, so a program that
ends finishes its save.

The copy is also the newest state in memory: `SaveHandle.restore` copies it back after a bad step.

Rejected: a second process (needs another copy of the state, and dies with its parent anyway), and a queue of saves
(needs memory for two states, and a disk slower than the saves never catches up).
"""

from __future__ import annotations

import enum
import itertools
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
from zckpt.gc_pause import collector_paused
from zckpt.loading.memory import MemoryCheckpoint
from zckpt.ranks import ALONE, Peers
from zckpt.saving.plan import SaveRequest
from zckpt.saving.retention import KEEP_ALL, RetentionPolicy
from zckpt.saving.save import SaveContent, SaveJob, run_save
from zckpt.sources.views import VIEWS_KEY, Tensors, plan_restore
from zckpt.storage.local_files import huge_pages
from zckpt.storage.storage import LOCAL, Storage

_ALIGN_NBYTES = 64


class WhenBusy(enum.Enum):
    """Behavior of a save while the previous one is still being written."""

    WAIT = "wait"
    REFUSE = "refuse"  # raise CheckpointInputError; in a world of one only


@final
@attrs.define(eq=False)
class SaveHandle:
    """One background save, running or finished."""

    job: SaveJob  # its shards are the copies
    live: Sequence[ShardLike]  # the shards passed by the caller; their copies come first in `job.shards`
    thread: threading.Thread | None = None  # None: not started
    path: Path | None = None  # set once the checkpoint is durable
    error: BaseException | None = None  # of a failed save; the first check raises and clears it
    holds_copy: bool = True  # False once a later save has reused the memory
    unreported: list[str] = attrs.field(factory=list)  # text of the error, until it is raised

    def __attrs_post_init__(self) -> None:
        weakref.finalize(self, _warn_unreported, self.job.request.tag, self.unreported)

    @property
    def done(self) -> bool:
        """True once the save has ended, successfully or not."""
        return self.thread is not None and not self.thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> Path:
        """Wait until the checkpoint is durable and return its folder.

        Raises the error of a failed save; TimeoutError after `timeout_s`.
        """
        if self.thread is not None:
            self.thread.join(timeout_s)
        if not self.done:
            raise TimeoutError(f"the save of {self.job.request.tag!r} is not done after {timeout_s} s")
        self.check()
        if self.path is None:
            raise CheckpointError(f"the save of {self.job.request.tag!r} failed; its error was raised before")
        return self.path

    def check(self) -> None:
        """Raise the error of a failed save, unless it was raised before; never waits."""
        if self.done and self.error is not None:  # done first: until then the thread may set the error
            error, self.error = self.error, None
            self.unreported.clear()
            raise error

    def restore(self) -> None:
        """Copy the saved state back into the tensors it came from, even before it is on disk.

        Raises CheckpointInputError if a later save has reused the memory.
        """
        if not self.holds_copy:
            raise self._overwritten_error()
        kept = {shard.name: shard for shard in self.job.shards}
        kinds = {name: (shard.tensor.dtype, shape_of(shard)) for name, shard in kept.items()}
        restore = plan_restore(self.job.tensors, self.job.objects.get(VIEWS_KEY), kinds, optimizer=True)
        with torch.no_grad():
            for live, copy in zip(self.live, self.job.shards):
                live.tensor.copy_(copy.tensor)
            for live in restore.shards:
                live.tensor.copy_(kept[live.name].tensor)
        restore.commit()

    def checkpoint(self, peers: Peers = ALONE) -> MemoryCheckpoint:
        """The copy as a checkpoint, readable by the ranks that saved it, even before it is on disk.

        Raises CheckpointInputError if a later save has reused the memory.
        """
        if not self.holds_copy:
            raise self._overwritten_error()
        request = self.job.request
        shards, objects, mine = self.job.shards, dict(self.job.objects), dict(self.job.rank_objects)
        return MemoryCheckpoint.of(shards, objects, mine, tag=request.tag, step=request.step, peers=peers)

    def _overwritten_error(self) -> CheckpointInputError:
        return CheckpointInputError(
            f"the copy of {self.job.request.tag!r} is gone: a later save reused its memory. Restore the later save."
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

    The background thread communicates through `peers`: nothing else may use them, so pass `group_peers` of a process
    group of its own.

    Raises CheckpointInputError for `when_busy="refuse"` on several ranks.
    """

    peers: Peers = ALONE
    when_busy: WhenBusy = attrs.field(default=WhenBusy.WAIT, converter=WhenBusy)
    newest: SaveHandle | None = attrs.field(init=False, default=None)
    memory: HostMemory = attrs.field(init=False, factory=lambda: HostMemory())

    def __attrs_post_init__(self) -> None:
        if self.when_busy is WhenBusy.REFUSE and self.peers.world_size > 1:
            raise CheckpointInputError(
                f'when_busy="refuse" in a world of {self.peers.world_size}: ranks finish at different times, so one '
                'would raise while others start saving. Use when_busy="wait".'
            )

    @collector_paused()
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
        """Like zckpt.save, but return when the tensors are copied and may change.  Every rank calls it.

        Raises the unreported error of an earlier save; then no save is started.
        """
        self._wait_for_previous()
        request = SaveRequest.of(tag, step, latest=latest, overwrite=overwrite, writers=writers)
        job = SaveJob.of(root, request, SaveContent(shards, tensors, objects, rank_objects), keep, storage)
        if self.newest is not None:
            _drop_copy(self.newest)
        handle = SaveHandle(job, job.shards[: job.num_given])
        self._copy(handle)
        may_run = threading.Event()  # set last, so that the thread does not delay the return
        thread = threading.Thread(target=_run, args=(handle, self.peers, may_run), name="zckpt-save")
        thread.start()
        handle.thread, self.newest = (
            thread,
            handle,
        )  # after start(): a thread that failed to start is never waited for
        may_run.set()
        return handle

    def check(self) -> None:
        """Raise the error of the last save, unless it was raised before; never waits."""
        if self.newest is not None:
            self.newest.check()

    def wait(self) -> None:
        """Wait until no save is running; raise the error of the last one, unless it was raised before."""
        if self.newest is not None and self.newest.thread is not None:
            self.newest.thread.join()
            self.newest.check()

    def close(self) -> None:
        """Wait, free the memory, and raise an unreported error."""
        try:
            self.wait()
        finally:
            if self.newest is not None:
                _drop_copy(self.newest)
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
        """Replace the job's tensors by copies.  Stores an error in the job: the vote raises it on all ranks."""
        try:
            job = handle.job
            handle.job = attrs.evolve(
                job,
                shards=self.memory.copy_shards(job.shards),
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
    """Save in the background with the options of `AsyncSaver.save`; without a saver, the handle owns the memory.

    >>> import tempfile, torch, zckpt
    >>> handle = zckpt.save_async(tempfile.mkdtemp(), tensors={"w": torch.ones(2)}, step=1)
    >>> handle.wait().name  # the loop may go on before
    'step-1'
    """
    return (saver or AsyncSaver(peers)).save(root, tag, **options)


def _drop_copy(handle: SaveHandle) -> None:
    """Drop the copy of a finished save, so that its memory can be reused or freed."""
    handle.holds_copy = False
    handle.job = attrs.evolve(handle.job, shards=())


def _run(handle: SaveHandle, peers: Peers, may_run: threading.Event) -> None:
    """Run the save in the background thread."""
    may_run.wait()
    try:
        handle.path = run_save(handle.job, peers)
    except BaseException as error:
        handle.error = error
        handle.unreported.append(f"{type(error).__name__}: {error}")


def _warn_unreported(tag: str, unreported: list[str]) -> None:
    """Warn about an error that was never raised; called when the handle is deleted."""
    if unreported:
        text = f"the background save of {tag!r} failed and its error was never checked: {unreported[0]}"
        warnings.warn(text, CheckpointWarning, stacklevel=2)


@final
@attrs.define(eq=False)
class HostMemory:
    """One buffer for the copies of all tensors, reused while it is large enough."""

    data: Tensor = attrs.field(factory=lambda: torch.empty(0, dtype=torch.uint8))
    kinds: list[tuple[int, torch.dtype]] = attrs.field(factory=list)  # bytes and dtype of each of `rooms`
    rooms: list[Tensor] = attrs.field(factory=list)  # parts of `data`, for the copies

    def copy_shards(self, shards: Sequence[ShardLike]) -> list[ShardLike]:
        """Copy the tensors of the shards; the copies are valid until the next call."""
        tensors = [shard.tensor.detach() for shard in shards]
        self._make_rooms(tensors)
        made: list[ShardLike] = []
        for shard, tensor, room in zip(shards, tensors, self.rooms, strict=True):
            if tensor.dim() != 1:
                check_shard(shard)  # raises; the background thread checks the rest
            room.copy_(tensor, non_blocking=True)
            made.append(_CopiedShard(shard.name, shard.global_shape, shard.box, shard.span, room))
        _synchronize(tensors)
        return made

    def _make_rooms(self, tensors: Sequence[Tensor]) -> None:
        """Make the rooms, if those of the last call do not fit."""
        kinds = [(tensor.nbytes, tensor.dtype) for tensor in tensors]
        if kinds == self.kinds:
            return
        sizes = [-(-nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES for nbytes, _ in kinds]
        self.kinds, self.rooms = [], []
        if len(self.data) < sum(sizes):
            self.data = torch.empty(
                0, dtype=torch.uint8
            )  # frees the smaller one first: pinned memory is resident at once
            self.data = _allocate(sum(sizes), pinned=any(each.is_cuda for each in tensors))
        starts = itertools.accumulate(sizes, initial=0)
        rooms = [self.data[at : at + nbytes].view(dtype) for at, (nbytes, dtype) in zip(starts, kinds)]
        self.kinds, self.rooms = kinds, rooms


@final
@attrs.frozen(eq=False)
class _CopiedShard:
    """The copy of a shard."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    span: Span
    tensor: Tensor


def _allocate(nbytes: int, pinned: bool) -> Tensor:
    """(nbytes,) uint8; on huge pages where the system supports them, as page faults dominate the cost."""
    if pinned:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(huge_pages(nbytes), dtype=torch.uint8)


def _synchronize(tensors: Sequence[Tensor]) -> None:
    """Wait for the copies from the devices of these tensors."""
    for device in {each.device for each in tensors if each.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
