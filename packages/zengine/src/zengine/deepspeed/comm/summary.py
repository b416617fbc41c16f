"""`deepspeed.comm.configure` and `log_summary`: a tally of every collective of this process since it was switched on.

DeepSpeed keeps one logger a process, and so does this: its functions have no argument that could carry one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, final

import attrs

import zcomm
from zengine.telemetry.comms import CommsLog, NoCommsLog

__all__ = ["configure", "log_summary"]

log = logging.getLogger("zengine")


@final
@attrs.define(eq=False)
class _Switch:
    """The log that is running, and the records of each operation for `return_dict`."""

    comms: CommsLog | NoCommsLog = attrs.field(factory=NoCommsLog)
    ops: frozenset[str] = frozenset()  # those that are wanted; none means all
    ms: dict[str, list[float]] = attrs.field(factory=dict)  # operation -> time of each, in order
    nbytes: dict[str, list[int]] = attrs.field(factory=dict)

    def start(self, ops: frozenset[str]) -> None:
        self.stop()
        self.ops = ops
        self.ms, self.nbytes = {}, {}

        def traced(sink: Any) -> Any:
            def both(record: zcomm.Record) -> None:
                if not self.ops or record.op in self.ops:
                    sink(record)
                    self.ms.setdefault(record.op, []).append(record.ms)
                    self.nbytes.setdefault(record.op, []).append(record.nbytes)

            return zcomm.traced(both)

        self.comms = CommsLog(traced)

    def stop(self) -> None:
        self.comms.close()
        self.comms = NoCommsLog()


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

    deepspeed_config: an engine's config counts by itself ("comms_logger"); a dict with that section is read here.
    """
    section = deepspeed_config.get("comms_logger", {}) if isinstance(deepspeed_config, dict) else {}
    wanted = section.get("enabled", False) if enabled is None else enabled
    ops = section.get("prof_ops", ()) if prof_ops is None else prof_ops
    every = section.get("prof_all", not ops) if prof_all is None else prof_all
    _switch.start(frozenset() if every else frozenset(ops)) if wanted else _switch.stop()


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Log the table of collectives so far, from rank 0.

    show_straggler: also how long each operation waited for the slowest rank; every rank must call.
    return_dict: give back {operation: {count, bytes, ms, straggler_ms}} instead of None.
    """
    waited = _straggling() if show_straggler else {}
    if zcomm.group_rank() == 0:
        lines = [f"  {op}: {ms:.2f} ms waiting for others" for op, ms in waited.items()]
        text = (
            _switch.comms.table() or "no collectives were counted: call deepspeed.comm.configure(enabled=True) first"
        )
        log.warning("%s", "\n".join([text, *lines]))
    if not return_dict:
        return None
    return {
        op: {
            "count": len(times),
            "bytes": sum(_switch.nbytes[op]),
            "ms": sum(times),
            "straggler_ms": waited.get(op, 0.0),
        }
        for op, times in _switch.ms.items()
    }


def _straggling() -> dict[str, float]:
    """This rank's time beyond the fastest rank's, by operation: the fastest came last, and waited for nobody."""
    everyone = zcomm.exchange({op: list(times) for op, times in _switch.ms.items()})
    found = {}
    for op, mine in _switch.ms.items():
        others = [ranks[op] for ranks in everyone if len(ranks.get(op, ())) == len(mine)]
        fastest = [min(times) for times in zip(*others)]
        found[op] = sum(own - best for own, best in zip(mine, fastest))
    return found
