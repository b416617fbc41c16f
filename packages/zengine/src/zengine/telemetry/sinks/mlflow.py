"""MLflow sink: one batch of metrics per point and axis, over the client's API.

Rejected: `mlflow.start_run` and `mlflow.log_metrics`, which act on the active run of the process; a program that has
one of its own would find it changed.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from zengine.telemetry.sinks.base import ServiceSink

if TYPE_CHECKING:
    from zengine.config.keys.telemetry import Mlflow
    from zengine.telemetry.subject import RunRecord

MAX_METRICS = 1000  # of a batch, MLflow's limit
MAX_PARAMETERS = 100  # of a batch, the same


@final
class MlflowSink(ServiceSink):
    """One run.  Empty settings of the plan are left to MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, plan: Mlflow) -> None:
        super().__init__(plan.samples_log_interval)
        mlflow: Any = importlib.import_module("mlflow")  # optional and untyped here
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client: Any = mlflow.MlflowClient(plan.tracking_uri or None)
        self._run: str = plan.run_id or self._start(plan)
        self._known: frozenset[str] = frozenset()  # parameters of a run that goes on: MLflow rejects other values
        if plan.run_id:
            self._client.update_run(plan.run_id, status="RUNNING")
            self._known = frozenset(self._client.get_run(plan.run_id).data.params)

    def _start(self, plan: Mlflow) -> str:
        """Create a run in its experiment, which is created if it does not exist; return the run's id."""
        name = plan.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        return str(self._client.create_run(experiment, run_name=plan.run_name or None).info.run_id)

    def begin(self, record: RunRecord) -> None:
        new = {name: str(value) for name, value in record.hparams.items() if name not in self._known}
        parameters = [self._entities.Param(name, value) for name, value in new.items()]
        for start in range(0, len(parameters), MAX_PARAMETERS):
            self._client.log_batch(self._run, params=parameters[start : start + MAX_PARAMETERS])

    def send(self, metrics: Mapping[str, float], x: int) -> None:
        now = int(time.time() * 1000)
        points = [self._entities.Metric(allowed(tag), value, now, x) for tag, value in metrics.items()]
        for start in range(0, len(points), MAX_METRICS):
            self._client.log_batch(self._run, metrics=points[start : start + MAX_METRICS])

    def close(self) -> None:
        self._client.set_terminated(self._run)


def allowed(tag: str) -> str:
    """Return a tag with the characters that MLflow takes."""
    return re.sub(r"[^\w./ -]", "_", tag)
