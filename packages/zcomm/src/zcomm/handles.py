"""What a collective returns: something to wait for.

torch's `Work` is not enough for three reasons: it does not say *which* collective failed, it leaves the life of
the tensors to the back end, and its time is unknown to us.  `Pending` adds the caller's label to every error,
keeps the tensors alive until the wait, and closes the trace record there.  World size 1 returns `DONE`, a
handle like any other, so that callers never ask.

A collective leaves a fingerprint when it is issued, and its failure is explained by those of all ranks
(`doctor.py`).  So a wait on Gloo is cut into slices of a second, between which it hears that the world is condemned:
the others may have given up minutes before this rank's own time-out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, final

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zcomm import doctor, gloo, trace
from zcomm.fingerprint import Fingerprint, State

__all__ = ["DONE", "CollectiveFailed", "Handle", "after"]


class CollectiveFailed(RuntimeError):
    """A collective ended in an error: a peer died, timed out, or called something else.  The cause is chained.

    The message says what this rank waited for, and which rank differs, as far as the ranks could be asked.
    """


class Handle(Protocol):
    """A collective that was issued."""

    def wait(self) -> None:
        """Return when the result may be used (on a GPU: by work of the current stream).  May be called again.

        Raises CollectiveFailed if the collective did not succeed.
        """

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""

    def wait_for(self, seconds: float) -> bool:
        """Help and wait for that long at most; whether `wait` would return, or raise, at once."""


@final
class Done:
    """The handle of a collective that is finished or had nothing to move."""

    def wait(self) -> None:
        """Nothing to wait for."""

    def is_done(self) -> bool:
        return True

    def wait_for(self, seconds: float) -> bool:
        return True

    def __repr__(self) -> str:
        return "zcomm.DONE"


DONE: Handle = Done()


def after(handle: Handle, finish: Callable[[], Handle | None]) -> Handle:
    """A handle that runs `finish` once, without gradients, when `handle` is done; it may return the next to wait for.

    It runs in the first `wait`, or in an `is_done` that finds `handle` done; other threads that look meanwhile wait
    for it.  What it issues may be collective, where the ranks look after such handles of a group in one order.
    If the message or `finish` fails, so does every further look, with the same error.
    """
    return _After(handle, finish)


@final
@attrs.define(eq=False)
class _After:
    """A handle with work of its own to do once the message is there."""

    handle: Handle  # the message; once `finish` has run, what it has returned, or its error
    finish: Callable[[], Handle | None] | None  # None once it has begun
    running: threading.Lock = attrs.field(factory=threading.Lock)  # held while it runs

    def wait(self) -> None:
        self.handle.wait()
        self._run()
        self.handle.wait()

    def is_done(self) -> bool:
        if not self.handle.is_done():
            return False
        self.handle.wait()  # its error, and its end for the trace
        self._run()
        return self.handle.is_done()

    def wait_for(self, seconds: float) -> bool:
        until_s = time.monotonic() + seconds
        if not self.handle.wait_for(seconds):
            return False
        self.handle.wait()
        self._run()
        return self.handle.wait_for(until_s - time.monotonic())

    def _run(self) -> None:
        with self.running:
            try:
                finish, self.finish = self.finish, None
                if finish is not None:
                    with torch.no_grad():
                        self.handle = finish() or DONE
            except Exception as error:
                self.handle = _Failed(error)
                raise
            except BaseException:
                self.handle = _Failed(CollectiveFailed("what follows a message was interrupted on this rank."))
                raise


@final
@attrs.frozen(eq=False)
class _Failed:
    """The handle of what is over, and not well."""

    error: Exception

    def wait(self) -> None:
        raise self.error

    def is_done(self) -> bool:
        return True

    def wait_for(self, seconds: float) -> bool:
        return True


@attrs.frozen(eq=False)
class Call:
    """One collective in words: the subject of its error messages and of its trace record.  Holds no tensor."""

    op: str  # the public function's name
    label: str  # the caller's name for this use of it
    group_size: int  # ranks that take part
    dtype: str = ""  # of the payload, the larger of input and output, without "torch."; "" for a barrier
    numel: int = 0  # elements of the payload
    nbytes: int = 0  # bytes of the payload
    shape: tuple[int, ...] = ()  # of the payload
    device: torch.device | None = None  # of the payload

    @classmethod
    def of(cls, op: str, label: str, group_size: int, payload: Tensor) -> Call:
        dtype = str(payload.dtype).removeprefix("torch.")
        return cls(op, label, group_size, dtype, payload.numel(), payload.nbytes, payload.shape, payload.device)

    def __str__(self) -> str:
        payload = f" of {self.dtype}{list(self.shape)} on {self.device}" if self.dtype else ""
        return f"{named(self.op, self.label)}{payload} over {self.group_size} ranks"


def named(op: str, label: str) -> str:
    """How messages name a collective: `all_reduce 'grad_bucket[3]'`."""
    return f"{op} {label!r}" if label else op


@final
@attrs.define(eq=False)
class Pending:
    """A collective under way.

    Invariant: `work` is None exactly when the collective has been waited for with success; from then on no
    tensor is held.  After a failure every further wait raises again.
    """

    call: Call
    work: Any  # torch.distributed.Work; torch leaves it untyped in places
    tensors: tuple[Tensor, ...]  # kept alive until the wait
    sinks: tuple[trace.Sink, ...]  # the traces that were open at the issue
    index: int  # order of issue, for the trace
    issued_s: float  # time.perf_counter() at the issue
    entry: Fingerprint  # what the other ranks are told of it

    def is_done(self) -> bool:
        return self.work is None or bool(self.work.is_completed())

    def wait_for(self, seconds: float) -> bool:
        until_s = time.monotonic() + seconds
        parts = () if self.work is None else getattr(self.work, "works", (self.work,))
        return all(_is_over_by(until_s, part) for part in parts)

    def wait(self) -> None:
        if self.work is None:
            return
        began_s, stream = time.perf_counter(), trace.moment(self.call.device) if self.sinks else ()
        self.entry.state = State.WAITING
        try:
            _await(self.work, self.entry)
        except RuntimeError as error:
            raise _failure(self.entry, error, time.perf_counter() - self.issued_s) from error
        self.entry.state = State.DONE
        sinks = self.sinks
        self.work, self.tensors, self.sinks = None, (), ()
        if sinks:
            stall = (*stream, *trace.moment(self.call.device))
            trace.deliver(sinks, self._record(began_s, time.perf_counter(), stall))

    def _record(self, began_s: float, ended_s: float, stall: tuple[Any, ...]) -> trace.Record:
        return trace.Record(
            op=self.call.op,
            label=self.call.label,
            nbytes=self.call.nbytes,
            ms=(ended_s - self.issued_s) * 1e3,
            group_size=self.call.group_size,
            dtype=self.call.dtype,
            numel=self.call.numel,
            wait_ms=(ended_s - began_s) * 1e3,
            index=self.index,
            stall=stall,
        )


def start(
    call: Call,
    issue: Callable[[], Any],
    tensors: tuple[Tensor, ...],
    *,
    async_op: bool,
    group: ProcessGroup | None = None,
    detail: Any = None,
) -> Handle:
    """Issue a collective through torch; wait for it unless `async_op`.

    `issue` calls torch with async_op=True and returns the Work.  `group` and `detail` (a reduction, or the sender's
    rank in the world) are for the report of one that fails.  Raises ValueError where the back end cannot
    do this at all (dtype, device) and CollectiveFailed where it tried and failed.
    """
    sinks, index, issued_s = trace.open_sinks(), trace.next_index(), time.perf_counter()
    entry = doctor.watch(call, group, detail)
    try:
        doctor.consult(entry)
        work = issue()
    except RuntimeError as error:
        raise _failure(entry, error, time.perf_counter() - issued_s) from error
    entry.state = State.ISSUED
    handle = Pending(call, work, tensors, sinks, index, issued_s, entry)
    if async_op:
        return handle
    handle.wait()
    return DONE


_PAUSE_S = 5e-5  # between two looks
_HELP_S = 0.1  # at most, before a look whether the world is condemned


def _is_over_by(until_s: float, part: Any) -> bool:
    """Wait until then at most.  Shared memory is helped along; the others go on by themselves and are looked at."""
    helps = getattr(part, "help_for", None)
    while not (part.is_completed() if helps is None else helps(min(_HELP_S, until_s - time.monotonic()))):
        if doctor.is_condemned():
            return True  # `wait` raises
        if time.monotonic() >= until_s:
            return False
        if helps is None:
            time.sleep(_PAUSE_S)
    return True


def _await(work: Any, entry: Fingerprint) -> None:
    """Wait for `work`, in slices where torch can: over Gloo, whose wait gives up without harm to the collective."""
    is_sliced = entry.ring.backend == "gloo"
    for part in getattr(work, "works", (work,)):
        if not (is_sliced and isinstance(part, dist.Work)):
            part.wait()
            continue
        while not gloo.is_over(part):
            if doctor.is_condemned():
                raise RuntimeError("given up, because another rank has failed.")


_UNSUPPORTED = {
    "Invalid scalar type": "the back end cannot move or reduce this dtype. Cast it, or view it as uint8 to move it.",
    "No backend type associated with device": (
        "the group has no back end for this device. NCCL groups take cuda tensors, Gloo groups cpu tensors."
    ),
}


def _failure(entry: Fingerprint, error: RuntimeError, after_s: float) -> Exception:
    """The error to raise in place of torch's.  Asks the other ranks, for seconds at most."""
    for sign, advice in _UNSUPPORTED.items():
        if sign in str(error):
            entry.state = State.DONE
            return ValueError(f"{entry.call}: {advice}")
    entry.state = State.FAILED
    first_line = (str(error).splitlines() or [""])[0]
    return CollectiveFailed(f"{entry.call} failed after {after_s:.1f} s: {first_line}{doctor.explain(entry)}")
