"""Aim sink: one call per tag and boundary, into a local repository or to a tracking server."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from zengine.telemetry.sinks.base import ServiceSink

if TYPE_CHECKING:
    from zengine.config.keys.telemetry import Aim
    from zengine.telemetry.subject import RunRecord


@final
class AimSink(ServiceSink):
    """One run.  The terminal and the machine's metrics are not recorded: telemetry has the run's own."""

    def __init__(self, plan: Aim) -> None:
        super().__init__()
        aim: Any = importlib.import_module("aim")  # optional and untyped here
        self._run: Any = aim.Run(
            run_hash=plan.run_hash or None,
            repo=plan.repo or None,
            experiment=plan.experiment or None,
            system_tracking_interval=None,
            capture_terminal_logs=False,
        )
        if plan.run_name:
            self._run.name = plan.run_name

    def begin(self, record: RunRecord) -> None:
        self._run["hparams"] = dict(record.hparams)

    def send(self, metrics: Mapping[str, float], x: int) -> None:
        for tag, value in metrics.items():
            self._run.track(float(value), name=tag, step=x)

    def close(self) -> None:
        self._run.close()
