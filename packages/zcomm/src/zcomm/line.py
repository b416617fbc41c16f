"""The line by which ranks reach each other when their collectives do not work: keys in the store where they met.

The store has no part in the group that is stuck.  Ours is a connection of its own where torch can make one (`clone`),
because a client answers one request at a time, and the main thread may stand in one for minutes.

[Note: numbers of worlds]  A store may outlive a world (a launcher's does), and what an earlier world left in it would
be taken for a call of this one.  Each rank counts the worlds that it has begun in this store, in the store; the count
is part of every key, and equal on ranks that began the same number.

Rejected: sockets of our own (an address to agree on, a port to open), and a Gloo group for the purpose (it is as deaf
as the others when a peer is gone).
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from typing import Any, final

import attrs

from zcomm import compat
from zcomm.hosts import this_host
from zcomm.report import Answer, Report

_LOOK_S = 0.05  # between two looks at the store while something is awaited
_UNKNOWN_LIMIT_S = 1.0  # for a rank that never came to this line: it has nobody who could answer


@final
@attrs.define(eq=False)
class Line:
    """One rank's end.  Every method may raise torch's RuntimeError: the store is gone, with rank 0 for example."""

    store: Any  # torch.distributed.Store
    rank: int
    world_size: int
    number: int = 0  # see [Note: numbers of worlds]

    @classmethod
    def to(cls, store: Any, rank: int, world_size: int) -> Line:
        """Come to the line and say who this is."""
        found = cls(compat.PrefixStore("zcomm-doctor", compat.clone_store(store)), rank, world_size)
        found.number = found.store.add(f"worlds/{rank}", 1)
        found.store.set(found._key(f"here/{rank}"), json.dumps(_presence()))
        return found

    def call(self) -> bool:
        """Ask every rank for its report; True for the first who does so in this world, the one to decide."""
        return bool(self.store.add(self._key("calls"), 1) == 1)

    def is_called(self) -> bool:
        return self._has("calls")

    def publish(self, report: Report) -> None:
        """Tell the others; a rank that tells waits for the verdict afterwards, or decides it."""
        self.store.set(self._key(f"report/{self.rank}"), report.to_json())
        if report.answer is Answer.TOLD:
            self.store.add(self._key("told"), 1)

    def collect(self, limit_s: float) -> dict[int, Report]:
        """A report for every rank: its own, or what is known of one that gave none within the limit."""
        found: dict[int, Report] = {}
        began_s = time.monotonic()
        while len(found) < self.world_size:
            waited_s = time.monotonic() - began_s
            for rank in set(range(self.world_size)) - set(found):
                report = self._report_of(rank, waited_s, limit_s)
                if report is not None:
                    found[rank] = report
            if len(found) < self.world_size:
                time.sleep(_LOOK_S)
        return found

    def settle(self, verdict: str) -> None:
        """Decide."""
        self.store.set(self._key("verdict"), verdict)
        self._hear()

    def verdict(self, limit_s: float) -> str:
        """What the rank that decides has found; empty if it does not say so in time."""
        if not self._await(lambda: self._has("verdict"), limit_s):
            return ""
        found: str = self.store.get(self._key("verdict")).decode()
        self._hear()
        return found

    def linger(self, limit_s: float) -> None:
        """Stay until all who told have heard: the store often lives in rank 0, and dies with it."""
        if self.rank == 0:
            self._await(lambda: bool(self._count("heard") >= self._count("told")), limit_s)

    def await_everybody(self, limit_s: float) -> None:
        """Stay until every rank has heard, also those that have not noticed yet."""
        keys = [self._key(f"heard/{rank}") for rank in range(self.world_size)]
        self._await(lambda: bool(self.store.check(keys)), limit_s)

    def _hear(self) -> None:
        self.store.add(self._key("heard"), 1)
        self.store.set(self._key(f"heard/{self.rank}"), "")

    def _report_of(self, rank: int, waited_s: float, limit_s: float) -> Report | None:
        """The report of a rank, or why there is none, or None if it may still come."""
        if self._has(f"report/{rank}"):
            return Report.from_json(self.store.get(self._key(f"report/{rank}")))
        is_known = self._has(f"here/{rank}")
        presence = json.loads(self.store.get(self._key(f"here/{rank}"))) if is_known else {}
        if is_known and _is_gone(presence):
            if self._has(f"report/{rank}"):  # written between the two looks
                return None
            note = f"process {presence['pid']} of this host"
            return Report(rank=rank, world_size=self.world_size, answer=Answer.GONE, note=note)
        if waited_s < (limit_s if is_known else min(limit_s, _UNKNOWN_LIMIT_S)):
            return None
        note = f"process {presence['pid']} of host {presence['node']}" if is_known else "it has issued no collective"
        return Report(rank=rank, world_size=self.world_size, answer=Answer.SILENT, note=note)

    def _await(self, condition: Callable[[], bool], limit_s: float) -> bool:
        deadline_s = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_LOOK_S)
        return True

    def _count(self, key: str) -> int:
        return int(self.store.add(self._key(key), 0))

    def _has(self, key: str) -> bool:
        return bool(self.store.check([self._key(key)]))

    def _key(self, key: str) -> str:
        return f"{self.number}/{key}"


def _presence() -> dict[str, Any]:
    pid = os.getpid()
    return {"pid": pid, "node": platform.node(), "host": this_host(), "started": _started(pid)}


def _started(pid: int) -> str:
    """When a process of this host was started, in clock ticks; "" if it is gone or has ended and waits for burial."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()  # the name before may hold anything
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def _is_gone(presence: dict[str, Any]) -> bool:
    """Whether the process is known to have ended; False if it cannot be seen from here."""
    host = this_host()
    return bool(host) and presence["host"] == host and _started(presence["pid"]) != presence["started"]
