"""Base classes of the monitors: each is a sink of the telemetry, on rank 0."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, ClassVar

from zengine.deepspeed.comm.world import get_rank
from zengine.telemetry.sinks import Sinks
from zengine.telemetry.sinks.table import SINKS, open_sinks, require_packages

__all__ = ["Monitor", "SinkMonitor"]


class Monitor(abc.ABC):
    """Takes events: (tag, value, samples)."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config

    @abc.abstractmethod
    def write_events(self, event_list: Iterable[tuple[str, float, int]]) -> None:
        """Write them, on rank 0."""


class SinkMonitor(Monitor):
    """Monitor of one section.  monitor_config: the section, whose keys are attributes of the monitor as well.

    Raises zengine.telemetry.MissingPackageError if it is enabled and its package is missing.
    """

    section: ClassVar[str]  # of the config

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config)
        self.enabled = bool(monitor_config.enabled)
        plan: Any = SimpleNamespace(**{self.section: monitor_config})
        rows = [row for row in SINKS if row.section == self.section]
        require_packages(plan, rows)
        self._sinks = open_sinks(plan, rows=rows) if get_rank() == 0 else Sinks()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "monitor_config":
            raise AttributeError(name)
        return getattr(self.monitor_config, name)

    def write_events(self, event_list: Iterable[tuple[str, float, int]]) -> None:
        """Write (tag, value, samples) triples."""
        self._sinks.write_events([(tag, float(value), int(samples)) for tag, value, samples in event_list])

    def close(self) -> None:
        """Close the files, or the connection."""
        self._sinks.close()
