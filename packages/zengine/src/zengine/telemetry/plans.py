"""What telemetry reads of a plan, and of a communication trace, as structural types.

The resolved plan belongs to `zengine.config` and the trace to `zcomm`; neither is named here, so telemetry
can be driven by any object with these attributes and tested without either.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias


class MonitorLike(Protocol):
    """One file writing monitor (`tensorboard`, `csv_monitor`, `jsonl_monitor`)."""

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


class CometLike(Protocol):
    """The `comet` section; "" leaves a name to the package's own settings."""

    @property
    def enabled(self) -> bool: ...

    @property
    def samples_log_interval(self) -> int: ...  # samples between two points, at least

    @property
    def project(self) -> str: ...

    @property
    def workspace(self) -> str: ...

    @property
    def api_key(self) -> str: ...

    @property
    def experiment_name(self) -> str: ...

    @property
    def experiment_key(self) -> str: ...

    @property
    def online(self) -> bool: ...  # False: into a file

    @property
    def mode(self) -> str: ...


class RatesLike(Protocol):
    """The keys of `timers.throughput`."""

    @property
    def warmup_steps(self) -> int: ...  # first steps that are not measured

    @property
    def tokens_per_sample(self) -> int: ...  # 0: counted

    @property
    def peak_tflops(self) -> float: ...  # of one device; 0: from the table


class TelemetryPlanLike(Protocol):
    """Everything that decides what is measured and where it goes."""

    @property
    def is_wanted(self) -> bool: ...  # whether anything is asked for

    @property
    def steps_per_print(self) -> int: ...  # boundaries between console lines; 0 means never

    @property
    def wall_clock_breakdown(self) -> bool: ...  # time the phases

    @property
    def memory_breakdown(self) -> bool: ...  # read memory at the end of each phase

    @property
    def throughput(self) -> bool: ...  # samples per second

    @property
    def rates(self) -> RatesLike: ...

    @property
    def comms_log(self) -> bool: ...  # table of collectives

    @property
    def comms_ops(self) -> tuple[str, ...]: ...  # the operations it counts; () = all

    @property
    def bench_steps(self) -> int: ...  # measured steps after which the figures are told; 0 means never

    @property
    def gradient_histograms(self) -> int: ...  # steps between two; 0 means none

    @property
    def tensorboard(self) -> MonitorLike: ...

    @property
    def csv_monitor(self) -> MonitorLike: ...

    @property
    def jsonl_monitor(self) -> MonitorLike: ...

    @property
    def wandb(self) -> WandbLike: ...

    @property
    def comet(self) -> CometLike: ...


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

    @property
    def stall(self) -> tuple[Any, ...]: ...  # two events around the wait where a stream waits; else none


RecordSink: TypeAlias = Callable[[TraceRecord], None]
Trace: TypeAlias = Callable[[RecordSink], AbstractContextManager[object]]  # zcomm.traced, or a stand-in
