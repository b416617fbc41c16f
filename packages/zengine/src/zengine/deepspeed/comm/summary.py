"""`deepspeed.comm.configure` and `log_summary`: a tally of every collective of this process since it was switched on.

DeepSpeed keeps one logger a process, and so does this: its functions have no argument that could carry one.  An
engine whose config has `comms_logger` counts by itself, and `log_summary` finds it.
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
class _Switch:
    """The log that is running."""

    comms: CommsLog | NoCommsLog = attrs.field(factory=NoCommsLog)

    def turn(self, log: CommsLog | NoCommsLog) -> None:
        self.comms.close()
        self.comms = log


_switch = _Switch()


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Iterable[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Begin, or end, counting this process's collectives; `prof_ops` names those that count (default: all).

    deepspeed_config: a dict with a `comms_logger` section, whose values an argument of None takes.
    verbose, debug: a line a collective; set them in an engine's config, where they are honoured.
    """
    section = deepspeed_config.get("comms_logger", {}) if isinstance(deepspeed_config, dict) else {}
    wanted = section.get("enabled", False) if enabled is None else enabled
    ops = tuple(section.get("prof_ops", ()) if prof_ops is None else prof_ops)
    every = section.get("prof_all", not ops) if prof_all is None else prof_all
    _switch.turn(open_log(CommsLog(zcomm.traced, () if every else ops)) if wanted else NoCommsLog())
