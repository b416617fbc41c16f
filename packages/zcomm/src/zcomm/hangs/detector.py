"""Hang detector: when a collective fails on one rank, all ranks report their position and raise the same diagnosis.

Gloo and NCCL report only, after the time-out, that a peer did not come.  Here the first rank
whose collective fails requests reports (`side_channel.py`), collects them for a few seconds, and publishes one
diagnosis (`diagnosis.py`), which every rank puts into its CollectiveFailed.  A rank outside of any collective answers
from a thread that polls for requests once a second.  That thread also aborts the world: the pending and the next
collective of its rank fail with the same diagnosis, so no rank trains on alone and all exit non-zero.  Afterwards the
world can only be closed.

One detector per world, made at the first collective (or by `init`) and held by this module.  Its thread ends with
`World.close()`, or within a second of a default group destroyed otherwise.  The module holds the group weakly.  A
ProcessGroup has no place for state of ours, and callers of a collective have nothing but a group, so this module
alone knows the present world, one per process as torch's default group is.

Rejected: signals to the other ranks (they may be on another host, and a signal handler cannot use a store); separate
diagnoses on every rank (W ranks read W reports, and each draws another conclusion).
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

from zcomm import compat
from zcomm.hangs.diagnosis import diagnose
from zcomm.hangs.fingerprint import Call, Fingerprint, Ring, current_context, position
from zcomm.hangs.observer import HINT, UNOBSERVED, install
from zcomm.hangs.report import Answer, CallSummary, GroupReport, Report, ranges
from zcomm.hangs.side_channel import SideChannel
from zcomm.hangs.verify import Verifier, no_verification

_POLL_S = 1.0  # between two polls for requests
_COLLECT_S = 3.0  # for the reports of the ranks that can answer
_DIAGNOSIS_S = 4.0  # for the deciding rank to publish its diagnosis
_DRAIN_S = 0.8  # for the others to receive it
_ACKNOWLEDGE_S = 2.5  # for all ranks to receive the reason of an abort, which they poll for
_COMMON_S = 1.5  # between the first and the last rank of a failure that all have
_LIMIT_S = 5.0  # for the whole, however slow the store is


@final
@attrs.define(eq=False)
class HangDetector:
    """Fingerprints and failure of this rank's world.

    Invariant: `failure`, once set, does not change; from then on every collective of the world fails.
    """

    world: weakref.ref[Any]  # torch's default group
    rank: int
    world_size: int
    channel: SideChannel | None  # to the other ranks; None without a working store
    verify: Callable[[Fingerprint], None]  # compares the ranks before a collective, or does nothing
    rings: weakref.WeakKeyDictionary[Any, Ring] = attrs.field(factory=weakref.WeakKeyDictionary)  # by group
    failure: str = ""  # diagnosis of the first failure anywhere in the world
    closing: weakref.WeakSet[Any] = attrs.field(factory=weakref.WeakSet)  # groups whose connections a failure closes
    lock: threading.Lock = attrs.field(factory=threading.Lock)  # threads that fail together ask the ranks once
    stopping: threading.Event = attrs.field(factory=threading.Event)  # ends the thread
    thread: threading.Thread | None = None  # answers requests; None without a channel

    def ring(self, group: Any) -> Ring:
        """Return the ring of `group` (None: the default group), made on first use."""
        key = self.world() if group is None else group
        found = self.rings.get(key)
        if found is None:
            found = self.rings.setdefault(key, _make_ring(key))
        return found

    def is_present(self) -> bool:
        """True while torch's default group is the one that this detector was made for."""
        world = dist.group.WORLD
        return world is not None and world is self.world()

    def explain(self) -> str:
        """Ask all ranks, once per world, and return the diagnosis.  Takes at most `_LIMIT_S` seconds."""
        with self.lock:
            if not self.failure:
                self.failure = _within(_LIMIT_S, self._request_diagnosis) or self._local_diagnosis(
                    "the store does not answer"
                )
        return self.failure

    def abort(self, reason: str) -> None:
        """Set `reason` as the failure, unless there is one.  Takes at most `_LIMIT_S` seconds."""
        with self.lock:
            if not self.failure:
                self.failure = _within(_LIMIT_S, lambda: self._publish(reason)) or reason

    def is_common_failure(self) -> bool:
        """Return True if every rank calls this within `_COMMON_S` seconds: all fail, none is left waiting."""
        channel = self.channel
        if channel is None or self.failure:
            return False
        return bool(_within(_LIMIT_S, lambda: "all" * channel.joins_failure(_COMMON_S)))

    def close_on_failure(self, group: Any) -> None:
        """Close the connections of `group` on failure; at once if the world has failed."""
        with self.lock:
            self.closing.add(group)
            is_late = bool(self.failure)
        if is_late:
            self._close_groups()

    def report(self) -> Report:
        """Report of this rank after a failure, made by any thread."""
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        return attrs.evolve(
            self._final_report(), answer=Answer.REPORTED, stack=tuple(position(main)), context=current_context()
        )

    def _final_report(self) -> Report:
        """Report of a rank that closes its world.  No stack: reading frames of a running thread is unsafe (3.11)."""
        groups = tuple(GroupReport.of(self.rings[group]) for group in self._used_groups())
        size = self.world_size
        return Report(rank=self.rank, world_size=size, answer=Answer.LEFT, context="", stack=(), groups=groups)

    def serve(self) -> None:
        """Run the thread: poll for a request, answer it, adopt the diagnosis.  Ends with the world."""
        channel = self.channel
        assert channel is not None, "a thread without a side channel"
        try:
            while not self.stopping.wait(_POLL_S) and self.is_present():
                if channel.is_requested():
                    channel.publish(self.report())
                    self._set_failure(channel.await_diagnosis(_DIAGNOSIS_S) or diagnose(channel.collect(0.0)))
                    self._close_groups()
                    return
            if not self.failure:
                channel.publish(self._final_report())
        except RuntimeError:
            return  # the store ended with the rank that held it: no rank can ask or answer any more

    def stop(self, limit_s: float = 2 * _LIMIT_S) -> None:
        """End the thread after its final report.  May be called again."""
        self.stopping.set()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(limit_s)

    def _request_diagnosis(self) -> str:
        """Request reports; the first rank to do so decides, the others wait for its diagnosis."""
        if self.channel is None:
            return self._local_diagnosis("this world has no store that they share")
        try:
            decides = self.channel.request_reports()
            self.channel.publish(self.report())
            if decides:
                diagnosis = diagnose(self.channel.collect(_COLLECT_S))
                self.channel.publish_diagnosis(diagnosis)
            else:
                diagnosis = self.channel.await_diagnosis(_DIAGNOSIS_S) or diagnose(self.channel.collect(0.0))
            self.channel.drain(_DRAIN_S)
            return diagnosis
        except RuntimeError as error:
            reason = (str(error).splitlines() or [""])[0]
            return self._local_diagnosis(f"the store is gone, and perhaps rank 0 with it ({reason})")

    def _publish(self, reason: str) -> str:
        """Publish the reason and wait until all ranks have it: a store in this process ends with the process."""
        if self.channel is None:
            return reason
        try:
            decides = self.channel.request_reports()
            self.channel.publish(self.report())
            if not decides:
                return self.channel.await_diagnosis(_DIAGNOSIS_S) or reason
            self.channel.publish_diagnosis(reason)
            self.channel.await_acknowledgements(_ACKNOWLEDGE_S)
            return reason
        except RuntimeError:
            return reason  # the store ended with rank 0: the other ranks will notice

    def _local_diagnosis(self, reason: str) -> str:
        own = diagnose({self.rank: self.report()})
        return f"{own}\nThe other ranks could not be asked: {reason}.{HINT}"

    def _set_failure(self, diagnosis: str) -> None:
        with self.lock:
            self.failure = self.failure or diagnosis

    def _close_groups(self) -> None:
        """End the waits of this rank's other threads inside torch; they find `failure` then.

        A kernel of NCCL whose peer does not come never ends, and the host waits for it wherever it next reads a
        number.  So what any group has in a GPU's queue is aborted as well.
        """
        with self.lock:
            is_present = self.is_present()
            closing = list(self.closing) if is_present else []
            used = self._used_groups() if is_present else []
        for end, group in (*((_close, each) for each in closing), *((compat.abort_queue, each) for each in used)):
            with contextlib.suppress(RuntimeError, ValueError):  # destroyed since: the others remain
                end(group)

    def _used_groups(self) -> list[Any]:
        """Return the groups that have carried collectives; others may add some meanwhile."""
        return [group for key in self.rings.keyrefs() if (group := key()) is not None]


def _close(group: Any) -> None:
    compat.close_group(group, dist.get_rank(group))


_current: HangDetector | None = None  # of torch's present default group, or of one that is gone
_start_lock = threading.Lock()


@final
class WorldObserver:
    """The observer that zcomm installs: passes collectives to the detector of the present world."""

    def record(self, call: Call, group: Any, detail: Any) -> Fingerprint:
        detector = start()
        ring = UNOBSERVED if detector is None else detector.ring(group)
        return ring.add(call, detail)

    def check(self, fingerprint: Fingerprint) -> None:
        detector = _current
        if detector is not None and fingerprint.ring is not UNOBSERVED:
            if detector.failure:
                raise RuntimeError("not issued: this world has failed before.")
            detector.verify(fingerprint)

    def is_aborted(self) -> bool:
        return is_aborted()

    def explain(self, fingerprint: Fingerprint) -> str:
        detector = _current
        if detector is None or fingerprint.ring is UNOBSERVED:
            return HINT
        origin = CallSummary.of(fingerprint).origin
        own = f"On rank {detector.rank} it is collective {fingerprint.sequence} of the group{origin}."
        diagnosis = detector.explain().replace("\n", "\n  ")
        return f"\n{own} All ranks together:\n  {diagnosis}"


def is_aborted() -> bool:
    """True once a collective has failed anywhere in the present world."""
    return _current is not None and bool(_current.failure)


def world_failure() -> str:
    """Failure of the present world; "" while it works, and outside a world."""
    detector = _current
    return detector.failure if detector is not None and detector.failure and detector.is_present() else ""


def start() -> HangDetector | None:
    """Return the detector of the present world, started on first use; None outside a world and in a world of one."""
    world = dist.group.WORLD
    if world is None:
        return None
    found = _current
    return found if found is not None and found.world() is world else _start(world)


def install_silent(world: Any, rank: int, size: int) -> None:
    """Install a detector that asks no other rank: for a world without other processes."""
    global _current
    _current = HangDetector(weakref.ref(world), rank, size, None, no_verification)


def stop() -> None:
    """End the present detector and its thread, before the default group is destroyed.  May be called again."""
    global _current
    with _start_lock:
        found, _current = _current, None
    if found is not None:
        found.stop()


def _start(world: Any) -> HangDetector | None:
    global _current
    size = dist.get_world_size()
    if size == 1:
        return None
    with _start_lock:
        if _current is not None and _current.world() is world:
            return _current  # another thread was faster
        if _current is not None:
            _current.stopping.set()  # of a group that is gone; its thread need not be joined
        _current = _make_detector(world, dist.get_rank(), size)
        return _current


def _make_detector(world: Any, rank: int, size: int, environ: Mapping[str, str] = os.environ) -> HangDetector:
    channel = _open_channel(rank, size)
    wanted = channel is not None and environ.get("ZCOMM_VERIFY", "0") not in ("", "0")
    verify = Verifier(channel, is_aborted).verify if channel is not None and wanted else no_verification
    found = HangDetector(weakref.ref(world), rank, size, channel, verify)
    if channel is not None:
        found.thread = threading.Thread(target=found.serve, daemon=True, name="zcomm-hang-detector")
        found.thread.start()
    return found


def _open_channel(rank: int, size: int) -> SideChannel | None:
    store = compat.default_store()
    try:
        return None if store is None else SideChannel.open(store, rank, size)
    except RuntimeError:  # a broken store must not break the world
        return None


def _make_ring(group: Any) -> Ring:
    timeout_s = compat.group_timeout_s(group, torch.device("cpu"), default=600.0)
    ranks = tuple(dist.get_process_group_ranks(group))
    title = "the default group" if group is dist.group.WORLD else f"the group of ranks {ranges(ranks)}"
    return Ring(group.group_name, ranks, compat.backend_of(group), timeout_s, title)


def _within(limit_s: float, request: Callable[[], str]) -> str:
    """Return the result of `request`, or "" on a time-out: a store on a lost host may block for minutes."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(request()), daemon=True, name="zcomm-diagnosis")
    try:
        thread.start()
    except (RuntimeError, MemoryError):  # a rank that is out of memory has none for a thread
        return request()
    thread.join(limit_s)
    return found[0] if found else ""


def _reset_after_fork() -> None:
    """Drop the detector in a forked child: its thread was not copied, and its connection is the parent's."""
    global _current
    _current = None


os.register_at_fork(after_in_child=_reset_after_fork)
atexit.register(stop)  # a thread inside torch while Python ends would crash the process
install(WorldObserver())
