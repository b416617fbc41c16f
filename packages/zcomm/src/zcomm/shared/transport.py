"""The collectives of one group through shared memory, from Python's side.

A `Transport` hands calls to C, keeps their tensors alive while C may touch them, and turns failures into errors.
What C does, and why nobody waits for ever, is told in csrc/zs_core.h and csrc/zs_engine.c.

Waiting goes to C for a tenth of a second at a time, without the interpreter's lock, and comes back in between: so
Ctrl-C works, which a single long wait would swallow.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import Any, final

import attrs
from torch import Tensor

from zcomm import doctor
from zcomm.shared.failure import Report, SharedMemoryFailed, describe, forked_from
from zcomm.shared.handshake import Members
from zcomm.shared.names import DTYPES, OPS, REDUCTIONS
from zcomm.shared.native import Library
from zcomm.shared.segment import Memory

__all__ = ["Message", "Routes", "SharedMemoryFailed", "Transport", "Work"]

_WAIT_MS = 100
_LABEL_BYTES = 63


@attrs.frozen(eq=False)
class Routes:
    """What of this rank's input goes where, and where in its output what comes from others.

    A rank sends each other the same number of runs.  sends, receives: (ranks, runs, 2) int64 on the CPU, place and
    length of each run in elements of the input or output.  The rest is of the whole table, so equal on all ranks.
    """

    sends: Tensor
    receives: Tensor
    longest: int  # elements that a rank sends to another, at most
    checksum: int  # 31 bits


@attrs.frozen(eq=False)
class Message:
    """One collective, checked.  `output` and `input` are contiguous CPU tensors, the same one for an op in place."""

    op: str  # of names.OPS
    output: Tensor | None  # None for a barrier, like input
    input: Tensor | None
    reduction: str | None = None  # of names.REDUCTIONS
    source: int = 0  # place in the group
    label: str = ""
    overlap: bool = False  # the caller goes on computing, rather than wait at once
    stride: int = 0  # elements from slice to slice of the larger tensor, if they do not adjoin
    routes: Routes | None = None  # of an exchange

    @property
    def payload(self) -> Tensor | None:
        """The tensor whose length all ranks must have in common: the whole, or the slice of one rank."""
        return self.output if self.op == "reduce_scatter" else self.input


@final
@attrs.frozen(eq=False)
class Work:
    """A collective that was issued; the part of torch.distributed.Work that handles use."""

    transport: Transport
    ticket: int

    def wait(self) -> None:
        self.transport.wait(self.ticket)

    def is_completed(self) -> bool:
        return self.transport.is_done(self.ticket)

    def help_for(self, seconds: float) -> bool:
        """Whether it is over, well or not, within that time."""
        return self.transport.help_for(self.ticket, seconds)


@final
@attrs.define(eq=False)
class Transport:
    """This rank's end of a group that shares memory.

    Invariant: `members` is None exactly when it is closed; then C touches no memory any more.
    """

    library: Library
    handle: Any  # zs_group *, freed with the last reference
    members: Members | None
    ranks: tuple[int, ...]  # of the members, in the world
    rank: int  # of this process, in the group
    pids: tuple[int, ...]
    segments: dict[int, tuple[Memory, ...]]  # number -> the others' mappings of a shared tensor
    in_flight: deque[tuple[int, Message]]  # calls by ticket whose tensors C may still touch, in order of issue
    lock: threading.Lock  # issue order is the order of in_flight
    num_segments: int = 0  # made so far: the next one's number, equal on all ranks

    @classmethod
    def open(cls, library: Library, members: Members, ranks: tuple[int, ...], timeout_s: float) -> Transport:
        """Raises MemoryError."""
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
        """Hand a collective to C.  Raises SharedMemoryFailed if the group is closed."""
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
            self._forget()
            ticket = self.library.lib.zs_issue(self.handle, call)
            if not ticket:
                raise MemoryError("zcomm: no memory for a collective")
            self.in_flight.append((ticket, message))
        return Work(self, ticket)

    def _route(self, call: Any, routes: Routes) -> None:
        """Fill in what an exchange has of its own.  Whoever keeps the message keeps the tables that C reads."""
        cast = self.library.ffi.cast
        call.numel, call.stride, call.source = routes.longest, routes.longest, routes.checksum
        call.num_runs = routes.sends.shape[1]
        call.sends = cast("int64_t *", routes.sends.data_ptr())
        call.receives = cast("int64_t *", routes.receives.data_ptr())

    def wait(self, ticket: int) -> None:
        """Return when the collective is done.  Raises SharedMemoryFailed naming the rank that is to blame."""
        self._check_process()
        wait = self.library.lib.zs_wait
        while (outcome := wait(self.handle, ticket, _WAIT_MS)) == 0:
            if doctor.is_condemned():
                raise SharedMemoryFailed("given up, because another rank has failed.")
        with self.lock:
            self._forget()
        if outcome < 0:
            raise SharedMemoryFailed(self._failure(ticket))

    def help_for(self, ticket: int, seconds: float) -> bool:
        """Help with the collective until it is over, well or not, or the time is."""
        if self._is_inherited():
            return True  # `wait` raises at once
        until_s = time.monotonic() + seconds
        while not self.library.lib.zs_wait(self.handle, ticket, round(max(1, min(_WAIT_MS, 1e3 * seconds)))):
            seconds = until_s - time.monotonic()
            if seconds <= 0:
                return False
        return True

    def issue_here(self, message: Message) -> Work:
        """A collective of the ranks that share memory: here all of them."""
        return self.issue(message)

    @property
    def memory(self) -> Transport:
        """Of the ranks that share memory: here all of them."""
        return self

    def told(self) -> tuple[str, str]:
        """What carries the group, and why."""
        return "shared memory", f"all {len(self.ranks)} ranks are on one host"

    def give_up(self) -> None:
        """Tell the others that they wait in vain for this rank, which has lost the ranks on other hosts."""
        if self.members is not None:
            self.library.lib.zs_give_up(self.handle)

    def is_done(self, ticket: int) -> bool:
        return self._is_inherited() or bool(self.library.lib.zs_is_done(self.handle, ticket))

    def is_closed(self) -> bool:
        return self.members is None

    def add_segment(self, number: int, nbytes: int, memories: list[Memory]) -> None:
        """Let collectives find a shared tensor of `nbytes`.

        memories: the segments of all ranks, this one's included, which is not kept.
        """
        ffi, own = self.library.ffi, self.rank
        bases = ffi.new("void *[]", [memory.address for memory in memories])
        if not self.library.lib.zs_add_segment(self.handle, number, nbytes, bases):
            raise MemoryError("zcomm: no memory for a shared tensor")
        self.segments[number] = tuple(memory for place, memory in enumerate(memories) if place != own)

    def drop_segment(self, number: int) -> None:
        """The tensor is dead on this rank: forget it, and unmap the others' part."""
        if self.segments.pop(number, None) is not None:
            self.library.lib.zs_drop_segment(self.handle, number)

    def close(self) -> None:
        """End the thread, fail what is under way, and unmap all but tensors that live.  May be called again.

        In a forked child it does nothing: the memory says that the parent is alive.
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
        """Raise SharedMemoryFailed if this process may not use the group, or not any more."""
        self._check_process()
        if self.members is None:
            raise SharedMemoryFailed("this rank has closed the group.")

    def _check_process(self) -> None:
        if self._is_inherited():
            raise SharedMemoryFailed(forked_from(self.pids[self.rank]))

    def _is_inherited(self) -> bool:
        """Whether this is a forked child of the member, which may not wait: the lock in C may be its parent's."""
        return os.getpid() != self.pids[self.rank]

    def _forget(self) -> None:
        """Let go of the tensors of calls that have ended.  With the lock held."""
        has_ended, in_flight = self.library.lib.zs_has_ended, self.in_flight
        while in_flight and has_ended(self.handle, in_flight[0][0]):
            in_flight.popleft()

    def _failure(self, ticket: int) -> str:
        report = self.library.ffi.new("zs_report *")
        self.library.lib.zs_failure(self.handle, report)
        found = Report.read(self.library.ffi, report)
        return describe(found, rank=self.rank, ranks=self.ranks, pids=self.pids, ticket=ticket)
