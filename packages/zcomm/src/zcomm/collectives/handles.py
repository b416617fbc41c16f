"""Handles: the value that a collective returns, to be waited for.

torch's `Work` is not enough for three reasons: it does not name the collective that failed, it leaves the lifetime of
the tensors to the back end, and it does not expose its time.  `Pending` adds the caller's label to every error, keeps
the tensors alive until the wait, and closes the trace record there.  At world size 1 a collective returns `DONE`, a
handle like any other, so callers need no second path.

A collective leaves a fingerprint when it is issued, and the fingerprints of all ranks explain its failure
(`zcomm.hangs`).  A wait on Gloo is therefore cut into slices of a second, after each of which it checks whether the
world has been aborted: another rank may have failed minutes before this rank's own time-out.
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

from zcomm import gloo
from zcomm.collectives import trace
from zcomm.collectives.launches import launching
from zcomm.hangs.fingerprint import Call, CallState, Fingerprint
from zcomm.hangs.observer import ABORTED, observer

__all__ = ["DONE", "CollectiveFailed", "Handle", "after"]


class CollectiveFailed(RuntimeError):
    """Raised when a collective fails: a peer died, timed out, or called another collective.  The cause is chained.

    The message names the collective that this rank waited for and, where the ranks could be asked, the rank that
    differs.
    """


class Handle(Protocol):
    """A collective that was issued."""

    def wait(self) -> None:
        """Return when the result may be used (on a GPU: by work of the current stream).  May be called again.

        Raises CollectiveFailed if the collective did not succeed.
        """

    def is_done(self) -> bool:
        """True if `wait` would return at once."""

    def wait_for(self, seconds: float) -> bool:
        """Wait for at most `seconds`, and help with the work.  True if `wait` would return, or raise, at once."""

    def proceed(self) -> None:
        """Issue all collectives that `wait` would still issue (see `after`); waits for what comes before them.

        So a rank chooses when they are issued.  Raises as `wait` does.
        """


@final
class Done:
    """Handle of a collective that is finished or had nothing to move."""

    def wait(self) -> None:
        """Return at once."""

    def is_done(self) -> bool:
        return True

    def wait_for(self, seconds: float) -> bool:
        return True

    def proceed(self) -> None:
        """Issue nothing."""

    def __repr__(self) -> str:
        return "zcomm.DONE"


DONE: Handle = Done()


def after(handle: Handle, finish: Callable[[], Handle | None]) -> Handle:
    """Return a handle that runs `finish` once, without gradients, when `handle` is done.

    `finish` may return another handle to wait for.  It runs in the first `wait`, or in an `is_done` that finds
    `handle` done; other threads that ask meanwhile wait for it.  It may issue collectives if all ranks wait for such
    handles of a group in one order.  If the collective or `finish` fails, every later call raises the same error.
    """
    return _Continuation(handle, finish)


@final
@attrs.define(eq=False)
class _Continuation:
    """A handle with work to do once its collective is done."""

    handle: Handle  # the collective; after `finish`, the handle that it returned, or its error
    finish: Callable[[], Handle | None] | None  # None once it has begun
    running: threading.Lock = attrs.field(factory=threading.Lock)  # held while it runs

    def wait(self) -> None:
        self.handle.wait()
        self._run()
        self.handle.wait()

    def is_done(self) -> bool:
        if not self.handle.is_done():
            return False
        self.handle.wait()  # raises its error, and closes its trace record
        self._run()
        return self.handle.is_done()

    def wait_for(self, seconds: float) -> bool:
        until_s = time.monotonic() + seconds
        if not self.handle.wait_for(seconds):
            return False
        self.handle.wait()
        self._run()
        return self.handle.wait_for(until_s - time.monotonic())

    def proceed(self) -> None:
        self.handle.proceed()
        if self.finish is not None:
            self.handle.wait()
        self._run()
        self.handle.proceed()

    def _run(self) -> None:
        with self.running:
            try:
                finish, self.finish = self.finish, None
                if finish is not None:
                    with torch.no_grad():
                        self.handle = finish() or DONE
            except Exception as error:
                self.handle = _FailedHandle(error)
                raise
            except BaseException:
                self.handle = _FailedHandle(CollectiveFailed("the work after a collective was interrupted here."))
                raise


@final
@attrs.frozen(eq=False)
class _FailedHandle:
    """Handle that raises an error."""

    error: Exception

    def wait(self) -> None:
        raise self.error

    def is_done(self) -> bool:
        return True

    def wait_for(self, seconds: float) -> bool:
        return True

    def proceed(self) -> None:
        raise self.error


@final
@attrs.define(eq=False)
class Pending:
    """Handle of a collective in flight.

    Invariant: `work` is None exactly when the collective has been waited for with success; from then on no tensor is
    held.  After a failure every further wait raises again.
    """

    call: Call
    work: Any  # torch.distributed.Work; torch leaves it untyped in places
    tensors: tuple[Tensor, ...]  # kept alive until the wait
    sinks: tuple[trace.Sink, ...]  # traces that were open at the issue
    index: int  # order of issue, for the trace
    issued_s: float  # time.perf_counter() at the issue
    fingerprint: Fingerprint  # for the other ranks

    def is_done(self) -> bool:
        return self.work is None or bool(self.work.is_completed())

    def wait_for(self, seconds: float) -> bool:
        until_s = time.monotonic() + seconds
        parts = () if self.work is None else getattr(self.work, "works", (self.work,))
        return all(_wait_until(until_s, part) for part in parts)

    def proceed(self) -> None:
        """Issue nothing: it is one collective."""

    def wait(self) -> None:
        if self.work is None:
            return
        began_s, stream = time.perf_counter(), trace.stream_event(self.call.device) if self.sinks else ()
        self.fingerprint.state = CallState.WAITING
        try:
            _await(self.work, self.fingerprint)
        except RuntimeError as error:
            raise _make_error(self.fingerprint, error, time.perf_counter() - self.issued_s) from error
        self.fingerprint.state = CallState.DONE
        sinks = self.sinks
        self.work, self.tensors, self.sinks = None, (), ()
        if sinks:
            stall = (*stream, *trace.stream_event(self.call.device))
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

    issue: calls torch with async_op=True and returns the Work.
    group, detail: for the report of a failure; `detail` is the reduction, or the sender's global rank.
    Raises ValueError if the back end does not support the call (dtype, device), CollectiveFailed if it failed.
    """
    launching(call.op, group)
    sinks, index, issued_s = trace.open_sinks(), trace.next_index(), time.perf_counter()
    fingerprint = observer().record(call, group, detail)
    try:
        observer().check(fingerprint)
        work = issue()
    except RuntimeError as error:
        raise _make_error(fingerprint, error, time.perf_counter() - issued_s) from error
    fingerprint.state = CallState.ISSUED
    handle = Pending(call, work, tensors, sinks, index, issued_s, fingerprint)
    if async_op:
        return handle
    handle.wait()
    return DONE


_POLL_S = 5e-5  # between two polls
_HELP_S = 0.1  # at most, between two checks for an abort


def _wait_until(until_s: float, part: Any) -> bool:
    """Wait until `until_s` at most; help with collectives through shared memory, poll the others."""
    helps = getattr(part, "help_for", None)
    while not (part.is_completed() if helps is None else helps(min(_HELP_S, until_s - time.monotonic()))):
        if observer().is_aborted():
            return True  # `wait` raises
        if time.monotonic() >= until_s:
            return False
        if helps is None:
            time.sleep(_POLL_S)
    return True


def _await(work: Any, fingerprint: Fingerprint) -> None:
    """Wait for `work`; over Gloo in slices, whose time-outs do not harm the collective."""
    is_sliced = fingerprint.ring.backend == "gloo"
    for part in getattr(work, "works", (work,)):
        if not (is_sliced and isinstance(part, dist.Work)):
            part.wait()
            continue
        while not gloo.wait_slice(part):
            if observer().is_aborted():
                raise RuntimeError(ABORTED)


_UNSUPPORTED = {
    "Invalid scalar type": "the back end cannot move or reduce this dtype. Cast it, or view it as uint8 to move it.",
    "No backend type associated with device": (
        "the group has no back end for this device. NCCL groups take cuda tensors, Gloo groups cpu tensors."
    ),
}


def _make_error(fingerprint: Fingerprint, error: RuntimeError, after_s: float) -> Exception:
    """Build the error that replaces torch's; ask the other ranks for their reports, for a few seconds at most."""
    for sign, advice in _UNSUPPORTED.items():
        if sign in str(error):
            fingerprint.state = CallState.DONE
            return ValueError(f"{fingerprint.call}: {advice}")
    fingerprint.state = CallState.FAILED
    first_line = (str(error).splitlines() or [""])[0]
    explanation = observer().explain(fingerprint)
    return CollectiveFailed(f"{fingerprint.call} failed after {after_s:.1f} s: {first_line}{explanation}")
