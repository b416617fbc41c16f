"""`comms_logger`: every rank counts its collectives, and leaves the sum in the run's folder.

The files (comms.rank0.json, ...) are what `zengine report` compares the ranks by.  They are written anew every few
seconds, so that a run that was killed leaves them too, and no rank waits for another.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, final

import zcomm
from zengine.features.base import Feature
from zengine.telemetry.comms import CommsLog, announce
from zengine.telemetry.sinks import training_goes_on
from zengine.telemetry.stragglers import open_log, to_json

if TYPE_CHECKING:
    from zengine.config.profiling import CommsPlan
    from zengine.engine import Engine
    from zengine.report import StepReport

FILE = "comms.rank{}.json"
INTERVAL_S = 10.0  # between two writes


@final
class CommsSummary(Feature):
    """Counts from `attach` to `close`."""

    def __init__(self, plan: CommsPlan, folder: Path | None) -> None:
        """folder: of the run; None for none, and then `log_summary` is the only reader."""
        self._plan = plan
        self._folder = folder
        self._telling = contextlib.ExitStack()  # holds the trace of verbose lines
        self._next_write = time.monotonic() + INTERVAL_S

    def attach(self, engine: Engine) -> None:
        self._world = engine.parts.world
        self._log = open_log(CommsLog(zcomm.traced, self._plan.ops))
        if self._plan.verbose:
            debug = self._plan.debug
            self._telling.enter_context(zcomm.traced(lambda record: announce(record, with_label=debug)))

    def step_end(self, report: StepReport) -> None:
        self._log.step_end()
        if time.monotonic() >= self._next_write:
            self._write()

    def close(self) -> None:
        """Count no further, and write the last time."""
        self._telling.close()
        self._log.close()
        self._write()

    def _write(self) -> None:
        self._next_write = time.monotonic() + INTERVAL_S
        folder, self._folder = self._folder, None  # there again once it has worked
        if folder is None:
            return
        with training_goes_on(f"the collectives of this rank in {folder}"):
            self._write_into(folder)
            self._folder = folder

    def _write_into(self, folder: Path) -> None:
        facts = {"rank": self._world.rank, "world_size": self._world.world_size}
        content = {**facts, "messages": [to_json(each) for each in self._log.messages()]}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE.format(self._world.rank)
        path.with_suffix(".part").write_text(json.dumps(content) + "\n", encoding="utf-8")
        path.with_suffix(".part").replace(path)
