"""`deepspeed.comm.configure` and `log_summary`: statistics of the collectives of this process.

Like DeepSpeed, this keeps one logger per process: its functions have no argument that could carry one.  An engine
whose config has `comms_logger` counts by itself, and `log_summary` finds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import attrs

import zcomm
from zengine.telemetry import log_summary
from zengine.telemetry.comms import CommsLog, NoCommsLog
from zengine.telemetry.stragglers import open_log

__all__ = ["configure", "log_summary"]


@final
@attrs.define(eq=False)
class _CurrentLog:
    """Log in use."""

    comms: CommsLog | NoCommsLog = attrs.field(factory=NoCommsLog)

    def replace(self, log: CommsLog | NoCommsLog) -> None:
        self.comms.close()
        self.comms = log


_current = _CurrentLog()


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Iterable[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Start or stop counting this process's collectives; `prof_ops` names those to count (default: all).

    deepspeed_config: a dict with a `comms_logger` section, which supplies the arguments that are None.
    verbose, debug: ignored here; an engine's config honours them.
    """
    section = deepspeed_config.get("comms_logger", {}) if isinstance(deepspeed_config, dict) else {}
    wanted = section.get("enabled", False) if enabled is None else enabled
    ops = tuple(section.get("prof_ops", ()) if prof_ops is None else prof_ops)
    every = section.get("prof_all", not ops) if prof_all is None else prof_all
    _current.replace(open_log(CommsLog(zcomm.traced, () if every else ops)) if wanted else NoCommsLog())
