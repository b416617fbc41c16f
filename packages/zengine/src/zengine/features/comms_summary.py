"""`comms_logger`: counts the collectives of every rank and writes the totals to the run's folder.

`zengine report` compares ranks by these files (comms.rank0.json, ...).  They are rewritten every few seconds, so a
killed run leaves them too and no rank waits for another.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, final

import zcomm
from zengine.engine.feature import Feature
from zengine.telemetry.comms import CommsLog, log_collective
from zengine.telemetry.sinks import log_os_errors
from zengine.telemetry.stragglers import open_log, to_json

if TYPE_CHECKING:
    from zengine.config.plan.telemetry import CommsPlan
    from zengine.engine.parts import Run
    from zengine.step_report import StepReport

FILE = "comms.rank{}.json"
INTERVAL_S = 10.0  # between two writes


@final
class CommsSummary(Feature):
    """Counts from `attach` to `close`."""

    def __init__(self, plan: CommsPlan, folder: Path | None) -> None:
        """Make the feature.  folder: folder of the run; None: write nothing, for `log_summary` alone."""
        self._plan = plan
        self._folder = folder
        self._verbose_trace = contextlib.ExitStack()  # holds the trace of verbose lines
        self._next_write = time.monotonic() + INTERVAL_S

    def attach(self, run: Run) -> None:
        self._world = run.parts.world
        self._log = open_log(CommsLog(zcomm.traced, self._plan.ops))
        if self._plan.verbose:
            debug = self._plan.debug
            self._verbose_trace.enter_context(zcomm.traced(lambda record: log_collective(record, with_label=debug)))

    def step_end(self, report: StepReport) -> None:
        self._log.step_end()
        if time.monotonic() >= self._next_write:
            self._write()

    def close(self) -> None:
        """Stop counting and write the final totals."""
        self._verbose_trace.close()
        self._log.close()
        self._write()

    def _write(self) -> None:
        self._next_write = time.monotonic() + INTERVAL_S
        folder, self._folder = self._folder, None  # restored after success: a failed write is not repeated
        if folder is None:
            return
        with log_os_errors(f"the collectives of this rank in {folder}"):
            self._write_into(folder)
            self._folder = folder

    def _write_into(self, folder: Path) -> None:
        facts = {"rank": self._world.rank, "world_size": self._world.world_size}
        content = {**facts, "messages": [to_json(each) for each in self._log.messages()]}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE.format(self._world.rank)
        path.with_suffix(".part").write_text(json.dumps(content) + "\n", encoding="utf-8")
        path.with_suffix(".part").replace(path)
