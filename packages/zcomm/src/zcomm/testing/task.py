"""One call of `run_ranks`: the job of each rank, and the collection of the results."""

from __future__ import annotations

import os
import pickle
import sys
import time
from multiprocessing.connection import wait
from typing import Any

import attrs

from zcomm.testing.failure import Ending, RankFailed, RankReport
from zcomm.testing.process import START_LIMIT_S, Rank
from zcomm.testing.rank import GO, READY, Job
from zcomm.testing.reference import FunctionRef

_GRACE_S = 2.0  # for the other ranks to report after one has failed
_OTHER_LAUNCHERS = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_")  # must not reach a rank


@attrs.frozen
class RunRequest:
    """Arguments of `run_ranks`."""

    function: FunctionRef
    world_size: int
    arguments: bytes  # pickle of (args, kwargs)
    timeout_s: float  # from the moment that all ranks are ready to call the function

    def for_rank(self, rank: int, store_path: str) -> Job:
        launch = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",  # unused: the default group exists before the function is called
        }
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(_OTHER_LAUNCHERS)}
        loopback = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
        return Job(
            rank=rank,
            world_size=self.world_size,
            store_path=store_path,
            timeout_s=self.timeout_s,
            function=self.function,
            arguments=self.arguments,
            environ=loopback | inherited | launch,
            cwd=os.getcwd(),
            path=list(sys.path),
        )


@attrs.define(eq=False)
class ResultCollector:
    """Collects the results of one call, with a time limit."""

    ranks: list[Rank]
    task: RunRequest
    ready: int = 0  # ranks that are connected
    values: dict[int, Any] = attrs.field(factory=dict)  # of ranks that returned
    reports: dict[int, RankReport] = attrs.field(factory=dict)  # of ranks that did not
    deadline_s: float = attrs.field(factory=lambda: time.monotonic() + START_LIMIT_S)

    def collect(self) -> list[Any]:
        while pending := self._pending():
            ready = wait(list(pending), timeout=max(0.0, self.deadline_s - time.monotonic()))
            if not ready:
                raise self._failure(hung=list(pending.values()))
            for connection in ready:
                self._receive(pending[connection])
        if self.reports:
            raise self._failure(hung=[])
        return [self.values[number] for number in range(len(self.ranks))]

    def _pending(self) -> dict[Any, int]:
        """Connections of the ranks that have not answered, and their numbers."""
        return {
            rank.connection: number
            for number, rank in enumerate(self.ranks)
            if number not in self.values and number not in self.reports
        }

    def _receive(self, number: int) -> None:
        """Receive one message of one rank."""
        try:
            message = self.ranks[number].connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            self._add_report(RankReport(number, Ending.DIED, self.ranks[number].exit_report()))
            return
        if message == READY:
            self.ready += 1
            if self.ready == len(self.ranks):
                self._release()
            return
        try:
            ending, value = pickle.loads(message)
        except Exception as error:
            text = f"its result cannot be unpickled in this process: {error!r}"
            self._add_report(RankReport(number, Ending.RAISED, text, type(error).__name__))
            return
        if ending is Ending.RETURNED:
            self.values[number] = value
        else:
            self._add_report(value)

    def _release(self) -> None:
        """Let all ranks call the function; their time starts."""
        self.deadline_s = time.monotonic() + self.task.timeout_s
        for rank in self.ranks:
            rank.send(GO)

    def _add_report(self, report: RankReport) -> None:
        self.reports[report.rank] = report
        self.deadline_s = min(self.deadline_s, time.monotonic() + _GRACE_S)

    def _failure(self, hung: list[int]) -> RankFailed:
        note = f": no answer within {self.task.timeout_s:g} s"
        if self.ready < len(self.ranks):
            note = f": not all ranks were connected within {START_LIMIT_S:g} s"
        if self.reports:
            note = ""  # the reports suffice
        for number in hung:
            self.reports[number] = RankReport(number, Ending.HUNG, self.ranks[number].stack())
        returned = [RankReport(number, Ending.RETURNED, "") for number in self.values]
        return RankFailed(self.task.function.qualname, len(self.ranks), [*self.reports.values(), *returned], note)
