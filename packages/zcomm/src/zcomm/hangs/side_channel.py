"""Side channel: keys in the rendezvous store, through which ranks communicate when their collectives hang.

The store is independent of the group that hangs.  The channel opens its own connection where torch can clone one,
because a client answers one request at a time and the main thread may block in one for minutes.

[Note: world numbers]  A store may outlive a world (a launcher's does), and keys left by an earlier world would be
taken for a request of this one.  Each rank counts, in the store, the worlds that it has begun there.  The count is
part of every key and equal on ranks that began the same number of worlds.

Rejected: sockets of our own (an address to agree on, a port to open); a Gloo group for the purpose (it blocks as the
others do when a peer is gone).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, final

import attrs

from zcomm import compat
from zcomm.hangs.report import Answer, Report
from zcomm.hosts import has_ended, memory_kills, process_identity

_POLL_S = 0.05  # between two polls of the store
_UNKNOWN_LIMIT_S = 1.0  # for a rank that never opened the channel: it has no thread that could answer


@final
@attrs.define(eq=False)
class SideChannel:
    """One rank's end.  Every method may raise torch's RuntimeError if the store is gone, with rank 0 for example.

    Keys in the store are a protocol: ranks of one world read each other's.
    """

    store: Any  # torch.distributed.Store
    rank: int
    world_size: int
    number: int = 0  # see [Note: world numbers]
    num_failures: int = 0  # of this rank, see `joins_failure`

    @classmethod
    def open(cls, store: Any, rank: int, world_size: int) -> SideChannel:
        """Open the channel and publish this rank's process."""
        found = cls(compat.PrefixStore("zcomm-doctor", compat.clone_store(store)), rank, world_size)
        found.number = found.store.add(f"worlds/{rank}", 1)
        found.store.set(found._key(f"here/{rank}"), json.dumps(process_identity()))
        return found

    def request_reports(self) -> bool:
        """Ask every rank for its report.  True for the first rank of this world to ask, which decides."""
        return bool(self.store.add(self._key("calls"), 1) == 1)

    def is_requested(self) -> bool:
        return self._has("calls")

    def publish(self, report: Report) -> None:
        """Publish this rank's report; a rank that reports a failure decides the diagnosis or waits for it."""
        self.store.set(self._key(f"report/{self.rank}"), report.to_json())
        if report.answer is Answer.REPORTED:
            self.store.add(self._key("told"), 1)

    def collect(self, limit_s: float) -> dict[int, Report]:
        """Collect a report for every rank, filled in for ranks that published none within the limit."""
        found: dict[int, Report] = {}
        began_s = time.monotonic()
        while len(found) < self.world_size:
            waited_s = time.monotonic() - began_s
            for rank in set(range(self.world_size)) - set(found):
                report = self._report_of(rank, waited_s, limit_s)
                if report is not None:
                    found[rank] = report
            if len(found) < self.world_size:
                time.sleep(_POLL_S)
        return found

    def publish_diagnosis(self, diagnosis: str) -> None:
        """Publish the decision of this rank."""
        self.store.set(self._key("verdict"), diagnosis)
        self._acknowledge()

    def await_diagnosis(self, limit_s: float) -> str:
        """Wait for the deciding rank's diagnosis; "" on a time-out."""
        if not self._await(lambda: self._has("verdict"), limit_s):
            return ""
        found: str = self.store.get(self._key("verdict")).decode()
        self._acknowledge()
        return found

    def joins_failure(self, limit_s: float) -> bool:
        """Count a failure of this rank; return True if every rank counts as many within the limit."""
        self.num_failures += 1
        key = f"failing/{self.num_failures}"
        self.store.add(self._key(key), 1)
        return self._await(lambda: self._count(key) >= self.world_size, limit_s)

    def drain(self, limit_s: float) -> None:
        """Wait on rank 0, whose process often holds the store, until all ranks that reported have the diagnosis."""
        if self.rank == 0:
            self._await(lambda: bool(self._count("heard") >= self._count("told")), limit_s)

    def await_acknowledgements(self, limit_s: float) -> None:
        """Wait until every rank has the diagnosis, including those that have not polled yet."""
        keys = [self._key(f"heard/{rank}") for rank in range(self.world_size)]
        self._await(lambda: bool(self.store.check(keys)), limit_s)

    def _acknowledge(self) -> None:
        self.store.add(self._key("heard"), 1)
        self.store.set(self._key(f"heard/{self.rank}"), "")

    def _report_of(self, rank: int, waited_s: float, limit_s: float) -> Report | None:
        """Report of a rank, or a substitute that names the cause, or None while it may still come."""
        if self._has(f"report/{rank}"):
            return Report.from_json(self.store.get(self._key(f"report/{rank}")))
        is_known = self._has(f"here/{rank}")
        identity = json.loads(self.store.get(self._key(f"here/{rank}"))) if is_known else {}
        if is_known and has_ended(identity):
            if self._has(f"report/{rank}"):  # written between the two polls
                return None
            note = f"process {identity['pid']} of this host{memory_kills()}"
            return Report(rank=rank, world_size=self.world_size, answer=Answer.GONE, note=note)
        if waited_s < (limit_s if is_known else min(limit_s, _UNKNOWN_LIMIT_S)):
            return None
        note = f"process {identity['pid']} of host {identity['node']}" if is_known else "it has issued no collective"
        return Report(rank=rank, world_size=self.world_size, answer=Answer.SILENT, note=note)

    def _await(self, condition: Callable[[], bool], limit_s: float) -> bool:
        deadline_s = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
        return True

    def _count(self, key: str) -> int:
        return int(self.store.add(self._key(key), 0))

    def _has(self, key: str) -> bool:
        return bool(self.store.check([self._key(key)]))

    def _key(self, key: str) -> str:
        return f"{self.number}/{key}"
