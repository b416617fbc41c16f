"""trackio sink: a local dashboard of runs, or one in a Hugging Face Space; a thread of the package sends."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from zengine.telemetry.sinks.base import ServiceSink

if TYPE_CHECKING:
    from zengine.config.keys.telemetry import Trackio
    from zengine.telemetry.subject import RunRecord


@final
class TrackioSink(ServiceSink):
    """One run; a run of the plan's name is continued.  TRACKIO_DIR and the package's other variables apply."""

    def __init__(self, plan: Trackio) -> None:
        super().__init__()
        trackio: Any = importlib.import_module("trackio")  # optional and untyped here
        self._run: Any = trackio.init(
            project=plan.project,
            name=plan.run_name or None,
            group=plan.group or None,
            space_id=plan.space_id or None,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def begin(self, record: RunRecord) -> None:
        self._run.config.update(dict(record.hparams))

    def send(self, metrics: Mapping[str, float], x: int) -> None:
        self._run.log(dict(metrics), step=x)

    def close(self) -> None:
        self._run.finish()
