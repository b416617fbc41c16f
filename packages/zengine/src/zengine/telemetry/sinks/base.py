"""Where snapshots go, and the promise that none of those places can stop training.

A sink may fail at any moment: the disk fills, the service goes away. `Sinks` then says once which one, where
and why, drops it for the rest of the run, and training goes on. The message goes through logging, not
`warnings`, because a program that turns warnings into errors must not be stopped either. A package that is
not installed is different: it is a mistake in the configuration, known before training, and raises on every
rank alike.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, final

from zengine.telemetry.plans import MonitorLike, TelemetryPlanLike
from zengine.telemetry.snapshot import Snapshot
from zengine.telemetry.subject import RunRecord

logger = logging.getLogger("zengine.telemetry")

Events: TypeAlias = Sequence[tuple[str, float, int]]  # tag, value, place on the x axis

# section of the config -> package, its name for pip, what it is needed for
_PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard", "writes TensorBoard events"),
    "wandb": ("wandb", "wandb", "sends metrics to Weights & Biases"),
    "comet": ("comet_ml", "comet-ml", "sends metrics to Comet"),
}


class Sink:
    """Takes one snapshot a boundary, and what the program adds to it.  This one is the identity."""

    def begin(self, record: RunRecord) -> None:
        """The engine is complete; called once, before the first snapshot."""

    def write(self, snapshot: Snapshot) -> None:
        """A boundary."""

    def write_events(self, events: Events) -> None:
        """Scalars of the program's own."""

    def close(self) -> None:
        """No more calls will come."""


class MissingPackageError(ImportError):
    """A monitor is enabled and the package that it needs is not installed."""


@final
class Sinks:
    """The sinks that still work."""

    def __init__(self) -> None:
        self._open: list[tuple[str, Sink]] = []  # what and where, for the message; and the sink

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, what: str, make: Callable[[], Sink]) -> None:
        """Open a sink; `what` names it and its place, e.g. "TensorBoard events in runs/a"."""
        try:
            self._open.append((what, make()))
        except Exception as cause:
            _warn(what, cause)

    def begin(self, record: RunRecord) -> None:
        self._each(lambda sink: sink.begin(record))

    def write(self, snapshot: Snapshot) -> None:
        self._each(lambda sink: sink.write(snapshot))

    def write_events(self, events: Events) -> None:
        self._each(lambda sink: sink.write_events(events))

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._open = []

    def _each(self, act: Callable[[Sink], None]) -> None:
        working = []
        for what, sink in self._open:
            try:
                act(sink)
                working.append((what, sink))
            except Exception as cause:
                _warn(what, cause)
        self._open = working


@contextmanager
def training_goes_on(what: str) -> Iterator[None]:
    """Around the writing of something that is no sink: a disk that fails is told, with `what` and where it is."""
    try:
        yield
    except OSError as cause:
        _warn(what, cause)


def _warn(what: str, cause: Exception) -> None:
    logger.warning(
        "%s: writing failed and has stopped for the rest of this run; training goes on. Cause: %s: %s",
        what,
        type(cause).__name__,
        cause,
    )


def folder_of(monitor: MonitorLike) -> Path:
    """output_path / job_name; both empty is the folder that the program was started in."""
    return Path(monitor.output_path or ".").expanduser() / monitor.job_name


def require_packages(plan: TelemetryPlanLike) -> None:
    """Raise MissingPackageError if an enabled monitor's package is absent; alike on every rank."""
    for section, is_enabled in (
        ("tensorboard", plan.tensorboard.enabled),
        ("wandb", plan.wandb.enabled),
        ("comet", plan.comet.enabled),
    ):
        if is_enabled:
            _require(section, *_PACKAGES[section])


def _require(section: str, package: str, for_pip: str, purpose: str) -> None:
    if is_installed(package):
        return
    raise MissingPackageError(
        f'config section "{section}" is enabled; it {purpose} and needs the package {package!r}, which is '
        f"not installed in {sys.executable}: install it (pip install {for_pip}), "
        f"or set {section}.enabled to false",
        name=package,
    )


def is_installed(package: str) -> bool:
    """A folder that merely has the package's name (wandb leaves one behind) is not the package."""
    if package in sys.modules:
        return sys.modules[package] is not None
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
