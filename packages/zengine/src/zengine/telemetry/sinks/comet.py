"""Comet sink: two calls per point, our tags over steps and DeepSpeed's tags over samples.

A point is sent every `samples_log_interval` samples, as in DeepSpeed's monitor, so a service does not slow a run of
small steps.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, final

from zengine.telemetry.sinks.base import Events, Sink
from zengine.telemetry.snapshot import SAMPLES, Snapshot

if TYPE_CHECKING:
    from zengine.config.keys.telemetry import Comet
    from zengine.telemetry.subject import RunRecord


@final
class CometSink(Sink):
    """One experiment.  Empty settings of the plan are left to the package (COMET_API_KEY, ~/.comet.config, ...)."""

    def __init__(self, plan: Comet) -> None:
        comet: Any = importlib.import_module("comet_ml")  # optional and untyped here
        given = {
            "api_key": plan.api_key,
            "workspace": plan.workspace,
            "project": plan.project,
            "experiment_key": plan.experiment_key,
            "mode": plan.mode,
        }
        self._experiment: Any = comet.start(
            online=plan.online, **{name: value for name, value in given.items() if value}
        )
        if plan.experiment_name:
            self._experiment.set_name(plan.experiment_name)
        self._interval = plan.samples_log_interval
        self._due = 0  # samples at which the next point is sent

    def begin(self, record: RunRecord) -> None:
        self._experiment.log_parameters(dict(record.hparams))

    def write(self, snapshot: Snapshot) -> None:
        samples = snapshot.report.samples
        if samples < self._due:
            return
        self._due = samples + self._interval
        scalars = snapshot.scalars()
        for is_theirs, step in ((True, samples), (False, snapshot.report.step)):
            family = {tag: value for tag, value in scalars.items() if tag.startswith(SAMPLES) == is_theirs}
            self._experiment.log_metrics(family, step=step)

    def write_events(self, events: Events) -> None:
        for tag, value, x in events:
            self._experiment.log_metrics({tag: float(value)}, step=x)

    def close(self) -> None:
        self._experiment.end()
