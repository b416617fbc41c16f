"""Weights & Biases sink: one `log` call per boundary.

Its own axis is the number of samples seen, as for DeepSpeed's tags; ours are drawn over `train/global_step`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, final

from zengine.telemetry.sinks.base import Events, Sink
from zengine.telemetry.snapshot import COMMUNICATION, GRADIENTS, MEMORY, PERF, TRAIN, Snapshot

if TYPE_CHECKING:
    from zengine.config.keys.telemetry import Wandb
    from zengine.telemetry.subject import RunRecord


@final
class WandbSink(Sink):
    """One run in the plan's project.  The package's environment variables (WANDB_MODE, ...) apply."""

    def __init__(self, plan: Wandb) -> None:
        wandb: Any = importlib.import_module("wandb")  # optional and untyped here
        self._run: Any = wandb.init(project=plan.project, group=plan.group or None, entity=plan.team or None)
        for family in (TRAIN, PERF, MEMORY, COMMUNICATION, GRADIENTS):
            self._run.define_metric(f"{family}*", step_metric=f"{TRAIN}global_step")

    def begin(self, record: RunRecord) -> None:
        self._run.config.update(dict(record.config))

    def write(self, snapshot: Snapshot) -> None:
        self._run.log(snapshot.scalars(), step=snapshot.report.samples)

    def write_events(self, events: Events) -> None:
        for tag, value, x in events:
            self._run.log({tag: float(value)}, step=x)

    def close(self) -> None:
        self._run.finish()
