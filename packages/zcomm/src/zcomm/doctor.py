"""The hang doctor: when a collective fails on one rank, every rank says where it is, and all of them fail alike.

Gloo and NCCL tell a rank that a peer did not come, after the time-out, and nothing else.  Here the first rank whose
collective fails calls for reports (`line.py`), gathers them for a few seconds, and publishes one diagnosis
(`diagnosis.py`), which every rank puts into its CollectiveFailed.  A rank that is in no collective answers from a
thread that looks once a second whether somebody called; that thread also condemns the world: the pending and the
next collective of its rank fail with the same diagnosis, so that no rank trains on alone and all exit non-zero.
After that the world can only be closed.

One doctor a world, made at its first collective (or by `init`), held by this module and not by the group, and gone
with it: the thread ends with `World.close()`, and within a second of a default group that was destroyed otherwise.
The module holds the group weakly.  Groups cannot carry the doctor (they are torch's), and callers of a verb have
nothing but a group, so this is the one place of the package that knows "the present world", as torch's default
group itself is one a process.

Rejected: a signal to the other ranks (another host, and a signal handler cannot talk to a store); asking on every
time-out without a verdict for all (W ranks read W reports, and each tells another story).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, final

import attrs
import torch
import torch.distributed as dist

from zcomm import compat, fingerprint
from zcomm.diagnosis import diagnose
from zcomm.fingerprint import Fingerprint, Ring, position
from zcomm.line import Line
from zcomm.report import Answer, Entry, GroupReport, Report, ranges
from zcomm.verify import Verifier, trust

_LOOK_S = 1.0  # between two looks whether somebody called
_COLLECT_S = 3.0  # for the reports of ranks that could speak
_VERDICT_S = 4.0  # for the rank that decides to say what it found
_LINGER_S = 0.8  # for the others to hear it
_HEARD_S = 2.5  # for them to hear from a rank that gives up, having looked for a call first
_LIMIT_S = 5.0  # for the whole, however the store behaves
_NOBODY = " (A peer died, timed out or called another collective; look at the other ranks first.)"


@final
@attrs.define(eq=False)
class Doctor:
    """What this rank knows of its world.

    Invariant: `verdict`, once set, does not change; from then on every collective of the world fails.
    """

    world: weakref.ref[Any]  # torch's default group
    rank: int
    world_size: int
    line: Line | None  # to the others; None if there is no store, or none that answers
    agree: Callable[[Fingerprint], None]  # asks the other ranks before a collective, or does nothing
    rings: weakref.WeakKeyDictionary[Any, Ring] = attrs.field(factory=weakref.WeakKeyDictionary)  # by group
    verdict: str = ""  # the diagnosis of the first failure anywhere in the world
    closing: weakref.WeakSet[Any] = attrs.field(factory=weakref.WeakSet)  # groups whose links a verdict closes
    asking: threading.Lock = attrs.field(factory=threading.Lock)  # threads that fail at once ask once
    leaving: threading.Event = attrs.field(factory=threading.Event)  # ends the thread
    thread: threading.Thread | None = None  # answers calls; None without a line

    def ring(self, group: Any) -> Ring:
        """The ring of `group`, of the default group if None."""
        key = self.world() if group is None else group
        found = self.rings.get(key)
        if found is None:
            found = self.rings.setdefault(key, _ring_of(key))
        return found

    def is_present(self) -> bool:
        """Whether torch's default group is still the one that this is the doctor of."""
        world = dist.group.WORLD
        return world is not None and world is self.world()

    def explain(self) -> str:
        """Ask all ranks, once a world, and say what came out.  Takes at most `_LIMIT_S` seconds."""
        with self.asking:
            if not self.verdict:
                self.verdict = _within(_LIMIT_S, self._inquire) or self._alone("the store does not answer")
        return self.verdict

    def give_up(self, reason: str) -> None:
        """Make `reason` the verdict, unless there is one.  Takes at most `_LIMIT_S` seconds."""
        with self.asking:
            if not self.verdict:
                self.verdict = _within(_LIMIT_S, lambda: self._tell(reason)) or reason

    def close_at_verdict(self, group: Any) -> None:
        """End what is waited for in `group` when there is a verdict, or now if there is one."""
        with self.asking:
            self.closing.add(group)
            is_late = bool(self.verdict)
        if is_late:
            self._close_links()

    def report(self) -> Report:
        """This rank's own, from any thread, for when something has gone wrong."""
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        return attrs.evolve(
            self._farewell(), answer=Answer.TOLD, stack=tuple(position(main)), context=fingerprint.said()
        )

    def _farewell(self) -> Report:
        """What a rank says that leaves in peace.  No stack: frames of a running thread are no safe read (3.11)."""
        alive = [group for key in self.rings.keyrefs() if (group := key()) is not None]  # others may add meanwhile
        groups = tuple(GroupReport.of(self.rings[group]) for group in alive)
        size = self.world_size
        return Report(rank=self.rank, world_size=size, answer=Answer.LEFT, context="", stack=(), groups=groups)

    def answer_calls(self) -> None:
        """The thread: look for a call, answer it, take the verdict over.  Ends with the world."""
        line = self.line
        assert line is not None, "a thread without a line"
        try:
            while not self.leaving.wait(_LOOK_S) and self.is_present():
                if line.is_called():
                    line.publish(self.report())
                    self._condemn(line.verdict(_VERDICT_S) or diagnose(line.collect(0.0)))
                    self._close_links()
                    return
            if not self.verdict:
                line.publish(self._farewell())
        except RuntimeError:
            return  # the store has gone with the rank that held it: nobody can call, and nobody be told

    def leave(self, limit_s: float = 2 * _LIMIT_S) -> None:
        """End the thread, having told the others.  May be called again."""
        self.leaving.set()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(limit_s)

    def _inquire(self) -> str:
        """Call, and decide if this rank is the first to call; else wait for the verdict."""
        if self.line is None:
            return self._alone("this world has no store that they share")
        try:
            decides = self.line.call()
            self.line.publish(self.report())
            if decides:
                verdict = diagnose(self.line.collect(_COLLECT_S))
                self.line.settle(verdict)
            else:
                verdict = self.line.verdict(_VERDICT_S) or diagnose(self.line.collect(0.0))
            self.line.linger(_LINGER_S)
            return verdict
        except RuntimeError as error:
            reason = (str(error).splitlines() or [""])[0]
            return self._alone(f"the store through which they met is gone, and rank 0 perhaps with it ({reason})")

    def _tell(self, reason: str) -> str:
        """Settle it, and stay until all have heard: who is told by a process that ends is told no more."""
        if self.line is None:
            return reason
        try:
            decides = self.line.call()
            self.line.publish(self.report())
            if not decides:
                return self.line.verdict(_VERDICT_S) or reason
            self.line.settle(reason)
            self.line.await_everybody(_HEARD_S)
            return reason
        except RuntimeError:
            return reason  # the store is gone, and rank 0 with it: they will find out

    def _alone(self, reason: str) -> str:
        own = diagnose({self.rank: self.report()})
        return f"{own}\nThe other ranks could not be asked: {reason}.{_NOBODY}"

    def _condemn(self, verdict: str) -> None:
        with self.asking:
            self.verdict = self.verdict or verdict

    def _close_links(self) -> None:
        """End what other threads of this rank wait for in torch; they find the verdict then."""
        with self.asking:
            groups = list(self.closing) if self.is_present() else []
        for group in groups:
            with contextlib.suppress(RuntimeError, ValueError):  # destroyed since: the others remain
                compat.close_group(group, dist.get_rank(group))


_current: Doctor | None = None  # of torch's present default group, or of one that is gone
_making = threading.Lock()
_unwatched = Ring("", ())  # collectives outside a world: there is nobody to compare them with


def watch(call: Any, group: Any, detail: Any) -> Fingerprint:
    """Remember a collective that is about to be issued.  The hot path: microseconds."""
    doctor = begin()
    ring = _unwatched if doctor is None else doctor.ring(group)
    return ring.add(call, detail)


def consult(entry: Fingerprint) -> None:
    """Raise RuntimeError if a collective must not be issued: the world is condemned, or the ranks disagree."""
    doctor = _current
    if doctor is not None and entry.ring is not _unwatched:
        if doctor.verdict:
            raise RuntimeError("not issued, because this world has failed before.")
        doctor.agree(entry)


def is_condemned() -> bool:
    """Whether a collective has failed somewhere in the present world."""
    return _current is not None and bool(_current.verdict)


def present_verdict() -> str:
    """Why the present world has failed; "" while it works, and outside a world."""
    doctor = _current
    return doctor.verdict if doctor is not None and doctor.verdict and doctor.is_present() else ""


def explain(entry: Fingerprint) -> str:
    """What to say after the back end's own words about the failure of a collective."""
    doctor = _current
    if doctor is None or entry.ring is _unwatched:
        return _NOBODY
    said = Entry.of(entry)
    own = f"Rank {doctor.rank} came to it as collective {entry.sequence} of the group{said.origin}."
    findings = doctor.explain().replace("\n", "\n  ")
    return f"\n{own} All ranks together:\n  {findings}"


def begin() -> Doctor | None:
    """The doctor of the present world, made if there is none; None outside a world and in a world of one."""
    world = dist.group.WORLD
    if world is None:
        return None
    found = _current
    return found if found is not None and found.world() is world else _made(world)


def end() -> None:
    """End the present doctor and its thread, before the default group is destroyed.  May be called again."""
    global _current
    with _making:
        found, _current = _current, None
    if found is not None:
        found.leave()


def _made(world: Any) -> Doctor | None:
    global _current
    size = dist.get_world_size()
    if size == 1:
        return None
    with _making:
        if _current is not None and _current.world() is world:
            return _current  # another thread was faster
        if _current is not None:
            _current.leaving.set()  # of a group that is gone; its thread needs no waiting for
        _current = _doctor_of(world, dist.get_rank(), size)
        return _current


def _doctor_of(world: Any, rank: int, size: int, environ: Mapping[str, str] = os.environ) -> Doctor:
    line = _line(rank, size)
    wanted = line is not None and environ.get("ZCOMM_VERIFY", "0") not in ("", "0")
    agree = Verifier(line, is_condemned).agree if line is not None and wanted else trust
    found = Doctor(weakref.ref(world), rank, size, line, agree)
    if line is not None:
        found.thread = threading.Thread(target=found.answer_calls, daemon=True, name="zcomm-doctor")
        found.thread.start()
    return found


def _line(rank: int, size: int) -> Line | None:
    store = compat.default_store()
    try:
        return None if store is None else Line.to(store, rank, size)
    except RuntimeError:  # a store that does not work must not keep a world from working
        return None


def _ring_of(group: Any) -> Ring:
    timeout_s = compat.group_timeout_s(group, torch.device("cpu"), otherwise=600.0)
    ranks = tuple(dist.get_process_group_ranks(group))
    title = "the default group" if group is dist.group.WORLD else f"the group of ranks {ranges(ranks)}"
    return Ring(group.group_name, ranks, compat.backend_of(group), timeout_s, title)


def _within(limit_s: float, ask: Callable[[], str]) -> str:
    """What `ask` returns if it does so in time, else "": a store on a host that vanished may block for minutes."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(ask()), daemon=True, name="zcomm-inquiry")
    thread.start()
    thread.join(limit_s)
    return found[0] if found else ""


def _forget() -> None:
    """In a forked child: the thread did not come along, and the connection is the parent's."""
    global _current
    _current = None


os.register_at_fork(after_in_child=_forget)
atexit.register(end)  # a thread that is inside torch while Python ends would crash the process
