"""Shared-memory transport of one group, from Python's side.

A `Transport` passes calls to C, keeps their tensors alive while C may touch them, and turns failures into errors.
csrc/zs_core.h and csrc/zs_engine.c describe the C side and why no wait is endless.

A wait enters C for a tenth of a second at a time, without the GIL, and returns in between, so Ctrl-C works; a single
long wait would block it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import Any, final

import attrs
from torch import Tensor

from zcomm.hangs.observer import ABORTED, observer
from zcomm.shared.failure import FailureReport, SharedMemoryFailed, describe, forked_message
from zcomm.shared.handshake import Members
from zcomm.shared.native import DTYPES, OPS, REDUCTIONS, Library
from zcomm.shared.segment import Memory

__all__ = ["Message", "Routes", "SharedMemoryFailed", "Transport", "Work"]

_WAIT_MS = 100
_LABEL_BYTES = 63


@attrs.frozen(eq=False)
class Routes:
    """Routes of this rank's input to the ranks, and of theirs into its output.

    A rank sends each other rank the same number of runs.  sends, receives: (ranks, runs, 2) int64 on the CPU, offset
    and length of each run in elements of the input or output.  The other fields describe the whole table and are
    equal on all ranks.
    """

    sends: Tensor
    receives: Tensor
    longest: int  # most elements that a rank sends to another
    checksum: int  # 31 bits


@attrs.frozen(eq=False)
class Message:
    """One collective, checked.  `output` and `input` are contiguous CPU tensors, the same one for an op in place."""

    op: str  # of names.OPS
    output: Tensor | None  # None for a barrier, as input
    input: Tensor | None
    reduction: str | None = None  # of names.REDUCTIONS
    source: int = 0  # rank in the group
    label: str = ""
    overlap: bool = False  # the caller computes meanwhile rather than wait at once
    stride: int = 0  # elements from slice to slice of the larger tensor; 0 if they adjoin
    routes: Routes | None = None  # of an all_to_all_v

    @property
    def payload(self) -> Tensor | None:
        """The tensor whose length must be equal on all ranks: the whole, or the slice of one rank."""
        return self.output if self.op == "reduce_scatter" else self.input

    @property
    def nbytes(self) -> int:
        """Bytes of the larger tensor."""
        return max(0 if tensor is None else tensor.nbytes for tensor in (self.output, self.input))


@final
@attrs.frozen(eq=False)
class Work:
    """A collective that was issued: the part of torch.distributed.Work that handles use."""

    transport: Transport
    ticket: int

    def wait(self) -> None:
        self.transport.wait(self.ticket)

    def is_completed(self) -> bool:
        return self.transport.is_done(self.ticket)

    def help_for(self, seconds: float) -> bool:
        """Help for that long at most.  True if the collective is over, successful or not."""
        return self.transport.help_for(self.ticket, seconds)


@final
@attrs.define(eq=False)
class Transport:
    """This rank's end of a group that shares memory.

    Invariant: `members` is None exactly when it is closed; C touches no memory then.
    """

    library: Library
    handle: Any  # zs_group *, freed with the last reference
    members: Members | None
    ranks: tuple[int, ...]  # global ranks of the members
    rank: int  # of this process, in the group
    pids: tuple[int, ...]
    segments: dict[int, tuple[Memory, ...]]  # number -> the other ranks' mappings of a shared tensor
    in_flight: deque[tuple[int, Message]]  # calls whose tensors C may still touch, in order of issue
    lock: threading.Lock  # makes the order of issue the order of in_flight
    num_segments: int = 0  # made so far: the next number, equal on all ranks

    @classmethod
    def open(cls, library: Library, members: Members, ranks: tuple[int, ...], timeout_s: float) -> Transport:
        """Open the group in C.  Raises MemoryError."""
        ffi, lib, size = library.ffi, library.lib, len(ranks)
        world_size = max(size, int(os.environ.get("LOCAL_WORLD_SIZE") or 0))
        handle = lib.zs_open(
            members.rank,
            size,
            ffi.new("void *[]", [memory.address for memory in members.controls]),
            ffi.new("int[]", members.pids),
            ffi.new("int[]", members.pidfds),
            timeout_s,
            len(os.sched_getaffinity(0)) * size // world_size,
        )
        if handle == ffi.NULL:
            raise MemoryError("zcomm: no memory for a group")
        handle = ffi.gc(handle, lib.zs_free)
        return cls(library, handle, members, ranks, members.rank, tuple(members.pids), {}, deque(), threading.Lock())

    def issue(self, message: Message) -> Work:
        """Pass a collective to C.  Raises SharedMemoryFailed if the group is closed."""
        self.check()
        ffi, payload = self.library.ffi, message.payload
        call = ffi.new("zs_call *")
        call.op, call.source, call.wake = OPS.index(message.op), message.source, message.overlap
        call.reduction = -1 if message.reduction is None else REDUCTIONS.index(message.reduction)
        call.dtype = -1
        call.label = message.label.encode()[:_LABEL_BYTES]
        if payload is not None and message.input is not None and message.output is not None:
            call.dtype, call.item_bytes = DTYPES[payload.dtype], payload.element_size()
            call.numel = payload.numel() // (len(self.ranks) if message.op == "all_to_all" else 1)
            call.stride = message.stride or call.numel
            call.input = ffi.cast("void *", message.input.data_ptr())
            call.output = ffi.cast("void *", message.output.data_ptr())
            if message.routes is not None:
                self._route(call, message.routes)
        with self.lock:
            self._release_tensors()
            ticket = self.library.lib.zs_issue(self.handle, call)
            if not ticket:
                raise MemoryError("zcomm: no memory for a collective")
            self.in_flight.append((ticket, message))
        return Work(self, ticket)

    def _route(self, call: Any, routes: Routes) -> None:
        """Fill in the fields of an all_to_all_v.  The message keeps the tables that C reads alive."""
        cast = self.library.ffi.cast
        call.numel, call.stride, call.source = routes.longest, routes.longest, routes.checksum
        call.num_runs = routes.sends.shape[1]
        call.sends = cast("int64_t *", routes.sends.data_ptr())
        call.receives = cast("int64_t *", routes.receives.data_ptr())

    def wait(self, ticket: int) -> None:
        """Return when the collective is done.  Raises SharedMemoryFailed naming the culprit."""
        self._check_process()
        wait = self.library.lib.zs_wait
        while (outcome := wait(self.handle, ticket, _WAIT_MS)) == 0:
            if observer().is_aborted():
                raise SharedMemoryFailed(ABORTED)
        with self.lock:
            self._release_tensors()
        if outcome < 0:
            raise SharedMemoryFailed(self._failure(ticket))

    def help_for(self, ticket: int, seconds: float) -> bool:
        """Help with the collective until it is over or the time is.  True if it is over, successful or not."""
        if self._is_forked():
            return True  # `wait` raises at once
        until_s = time.monotonic() + seconds
        while not self.library.lib.zs_wait(self.handle, ticket, round(max(1, min(_WAIT_MS, 1e3 * seconds)))):
            seconds = until_s - time.monotonic()
            if seconds <= 0:
                return False
        return True

    def issue_on_host(self, message: Message) -> Work:
        """Issue a collective of the ranks that share memory, here all of them."""
        return self.issue(message)

    @property
    def memory(self) -> Transport:
        """Transport of the ranks that share memory, here all of them."""
        return self

    def describe(self) -> tuple[str, str]:
        """Return the transport's name and the reason for it."""
        return "shared memory", f"all {len(self.ranks)} ranks are on one host"

    def abort(self) -> None:
        """Fail the group on all ranks of this host: this rank has lost the ranks on other hosts."""
        if self.members is not None:
            self.library.lib.zs_abort(self.handle)

    def is_done(self, ticket: int) -> bool:
        return self._is_forked() or bool(self.library.lib.zs_is_done(self.handle, ticket))

    def is_closed(self) -> bool:
        return self.members is None

    def add_segment(self, number: int, nbytes: int, memories: list[Memory]) -> None:
        """Register a shared tensor of `nbytes` with the collectives.

        memories: the segments of all ranks; this rank's own is not kept.
        """
        ffi, own = self.library.ffi, self.rank
        bases = ffi.new("void *[]", [memory.address for memory in memories])
        if not self.library.lib.zs_add_segment(self.handle, number, nbytes, bases):
            raise MemoryError("zcomm: no memory for a shared tensor")
        self.segments[number] = tuple(memory for place, memory in enumerate(memories) if place != own)

    def drop_segment(self, number: int) -> None:
        """Forget a tensor that is freed on this rank, and unmap the other ranks' part."""
        if self.segments.pop(number, None) is not None:
            self.library.lib.zs_drop_segment(self.handle, number)

    def close(self) -> None:
        """End the thread, fail what is in flight, and unmap all but live tensors.  May be called again.

        Does nothing in a forked child, since the shared memory marks the parent as alive.
        """
        members, self.members = self.members, None
        if members is None or os.getpid() != self.pids[self.rank]:
            return
        self.library.lib.zs_close(self.handle)
        for number in tuple(self.segments):
            self.drop_segment(number)
        self.in_flight.clear()
        members.close()

    def check(self) -> None:
        """Raise SharedMemoryFailed if this process may not use the group, or no longer."""
        self._check_process()
        if self.members is None:
            raise SharedMemoryFailed("this rank has closed the group.")

    def _check_process(self) -> None:
        if self._is_forked():
            raise SharedMemoryFailed(forked_message(self.pids[self.rank]))

    def _is_forked(self) -> bool:
        """True in a forked child of the member, which must not wait: its parent may hold the lock in C."""
        return os.getpid() != self.pids[self.rank]

    def _release_tensors(self) -> None:
        """Release the tensors of calls that have ended.  Requires the lock."""
        has_ended, in_flight = self.library.lib.zs_has_ended, self.in_flight
        while in_flight and has_ended(self.handle, in_flight[0][0]):
            in_flight.popleft()

    def _failure(self, ticket: int) -> str:
        report = self.library.ffi.new("zs_report *")
        self.library.lib.zs_failure(self.handle, report)
        found = FailureReport.read(self.library.ffi, report)
        return describe(found, rank=self.rank, ranks=self.ranks, pids=self.pids, ticket=ticket)
