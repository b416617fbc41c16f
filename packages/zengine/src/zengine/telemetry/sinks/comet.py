"""Comet sink: two calls per point, our tags over steps and DeepSpeed's tags over samples.

A point is sent every `samples_log_interval` samples, as in DeepSpeed's monitor.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from zengine.telemetry.sinks.base import ServiceSink

if TYPE_CHECKING:
    from zengine.config.keys.telemetry import Comet
    from zengine.telemetry.subject import RunRecord


@final
class CometSink(ServiceSink):
    """One experiment.  Empty settings of the plan are left to the package (COMET_API_KEY, ~/.comet.config, ...)."""

    def __init__(self, plan: Comet) -> None:
        super().__init__(plan.samples_log_interval)
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

    def begin(self, record: RunRecord) -> None:
        self._experiment.log_parameters(dict(record.hparams))

    def send(self, metrics: Mapping[str, float], x: int) -> None:
        self._experiment.log_metrics(dict(metrics), step=x)

    def close(self) -> None:
        self._experiment.end()
