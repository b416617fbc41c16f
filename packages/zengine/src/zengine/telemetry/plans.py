"""What telemetry reads of a plan, and of a communication trace, as structural types.

The resolved plan belongs to `zengine.config` and the trace to `zcomm`; neither is named here, so telemetry
can be driven by any object with these attributes and tested without either.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias


class MonitorLike(Protocol):
    """One file writing monitor (`tensorboard`, `csv_monitor`)."""

    @property
    def enabled(self) -> bool: ...

    @property
    def output_path(self) -> str: ...  # "" means the folder that the program was started in

    @property
    def job_name(self) -> str: ...  # folder below output_path; "" means output_path itself


class WandbLike(Protocol):
    """The `wandb` section."""

    @property
    def enabled(self) -> bool: ...

    @property
    def project(self) -> str: ...

    @property
    def group(self) -> str: ...  # "" means none

    @property
    def team(self) -> str: ...  # "" means the account's default


class TelemetryPlanLike(Protocol):
    """Everything that decides what is measured and where it goes."""

    @property
    def steps_per_print(self) -> int: ...  # boundaries between console lines; 0 means never

    @property
    def wall_clock_breakdown(self) -> bool: ...  # time the phases; synchronises the device on CUDA

    @property
    def memory_breakdown(self) -> bool: ...  # read memory at the end of each phase

    @property
    def throughput(self) -> bool: ...  # samples per second

    @property
    def comms_log(self) -> bool: ...  # table of collectives

    @property
    def tensorboard(self) -> MonitorLike: ...

    @property
    def csv_monitor(self) -> MonitorLike: ...

    @property
    def wandb(self) -> WandbLike: ...


class TraceRecord(Protocol):
    """One finished collective, as `zcomm.traced` hands it over."""

    @property
    def op(self) -> str: ...

    @property
    def label(self) -> str: ...  # the caller's name for it

    @property
    def nbytes(self) -> int: ...  # payload of this rank

    @property
    def group_size(self) -> int: ...  # ranks that took part

    @property
    def ms(self) -> float: ...  # host time from issue to the return of wait

    @property
    def wait_ms(self) -> float: ...  # the part of it that the host spent waiting


RecordSink: TypeAlias = Callable[[TraceRecord], None]
Trace: TypeAlias = Callable[[RecordSink], AbstractContextManager[object]]  # zcomm.traced, or a stand-in
