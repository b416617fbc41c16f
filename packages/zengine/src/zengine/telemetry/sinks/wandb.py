"""Weights & Biases: one `log` call a boundary, at step = samples seen."""

from __future__ import annotations

import importlib
from typing import Any, final

from zengine.telemetry.plans import WandbLike
from zengine.telemetry.snapshot import Snapshot


@final
class WandbSink:
    """One run in the plan's project. The package's own environment variables (WANDB_MODE, ...) apply."""

    def __init__(self, plan: WandbLike) -> None:
        wandb: Any = importlib.import_module("wandb")  # optional and untyped here
        self._run: Any = wandb.init(project=plan.project, group=plan.group or None, entity=plan.team or None)

    def write(self, snapshot: Snapshot) -> None:
        self._run.log(snapshot.scalars(), step=snapshot.report.samples)

    def close(self) -> None:
        self._run.finish()
