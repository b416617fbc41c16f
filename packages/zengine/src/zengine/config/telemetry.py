"""What is measured and where it goes: the part of a plan, of `resolve` and of its table that is about telemetry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs

from zengine.config.profiling import profiling
from zengine.config.telemetry_settings import EventFiles, RunFolder, TensorBoard

if TYPE_CHECKING:
    from zengine.config.load import Config
    from zengine.config.schema import Settings

__all__ = ["CometPlan", "MonitorPlan", "RatePlan", "TelemetryPlan", "idle_rates", "telemetry_plan", "telemetry_rows"]


@attrs.frozen(kw_only=True)
class MonitorPlan:
    """Where one kind of event file goes.  Names that a monitor does not know stay empty."""

    enabled: bool = False
    output_path: str = ""  # folder; "" means the working directory's default of that monitor
    job_name: str = ""  # folder of the run inside output_path
    group: str = ""  # wandb only
    team: str = ""  # wandb only
    project: str = ""  # wandb only


@attrs.frozen(kw_only=True)
class CometPlan:
    """The experiment of Comet."""

    enabled: bool = False
    samples_log_interval: int = 100  # samples between two points, at least
    project: str = ""  # "" leaves it to the package's own settings, here and below
    workspace: str = ""
    api_key: str = attrs.field(default="", repr=False)  # a secret: neither printed nor written
    experiment_name: str = ""
    experiment_key: str = ""
    online: bool = True
    mode: str = ""  # "get" | "create" | "get_or_create" | ""


@attrs.frozen(kw_only=True)
class RatePlan:
    """How speed is worked out (timers.throughput)."""

    warmup_steps: int = 2  # first steps that are not measured
    tokens_per_sample: int = 0  # 0: counted
    num_layers: int = 0  # 0: from the model
    hidden_size: int = 0  # 0: from the model
    recomputation: str = "auto"  # "yes" | "no" | "auto": found out in the first step
    peak_tflops: float = 0.0  # of one device; 0: from a table
    count_flops_at: int = 0  # step whose FLOPs are counted; 0: none


@attrs.frozen(kw_only=True)
class TelemetryPlan:
    """What is measured and where it is written."""

    steps_per_print: int = 0  # optimizer steps between two console lines; 0 = never
    wall_clock_breakdown: bool = False  # time forward, backward, communication and step
    memory_breakdown: bool = False  # memory at each phase
    throughput: bool = True  # samples per second (timers.throughput)
    rates: RatePlan = RatePlan()
    comms_log: bool = False  # count, bytes and time of collectives
    comms_ops: tuple[str, ...] = ()  # those that are counted; () = all
    bench_steps: int = 0  # measured steps after which the figures are told; 0 = never
    gradient_histograms: int = 0  # steps between two histograms (tensorboard.gradient_histograms); 0 = none
    tensorboard: MonitorPlan = MonitorPlan()
    csv_monitor: MonitorPlan = MonitorPlan()
    jsonl_monitor: MonitorPlan = MonitorPlan()
    wandb: MonitorPlan = MonitorPlan()
    comet: CometPlan = CometPlan()

    @property
    def is_wanted(self) -> bool:
        """Whether anything is asked for.  Throughput alone does not count: it goes nowhere without a place."""
        monitors = (self.tensorboard, self.csv_monitor, self.jsonl_monitor, self.wandb, self.comet)
        breakdowns = (self.wall_clock_breakdown, self.memory_breakdown, self.comms_log)
        numbers = (self.steps_per_print, self.bench_steps)
        return any(monitor.enabled for monitor in monitors) or any(breakdowns) or any(numbers)


def telemetry_plan(settings: Settings) -> TelemetryPlan:
    """The sections about telemetry, resolved."""
    return TelemetryPlan(
        steps_per_print=settings.steps_per_print,
        wall_clock_breakdown=settings.wall_clock_breakdown,
        memory_breakdown=settings.memory_breakdown,
        throughput=settings.timers.throughput.enabled or settings.bench_steps > 0,
        rates=_rates(settings),
        comms_log=profiling(settings).comms.enabled,
        comms_ops=profiling(settings).comms.ops,
        bench_steps=settings.bench_steps,
        gradient_histograms=settings.tensorboard.gradient_histograms if settings.tensorboard.enabled else 0,
        tensorboard=_files(settings.tensorboard),
        csv_monitor=_files(settings.csv_monitor),
        jsonl_monitor=_files(settings.jsonl_monitor),
        wandb=MonitorPlan(**attrs.asdict(settings.wandb)),
        comet=CometPlan(**attrs.asdict(settings.comet)),
    )


def _files(section: EventFiles | TensorBoard | RunFolder) -> MonitorPlan:
    return MonitorPlan(enabled=section.enabled, output_path=section.output_path, job_name=section.job_name)


def _rates(settings: Settings) -> RatePlan:
    section = settings.timers.throughput
    words = {"auto": "auto", True: "yes", False: "no"}
    return RatePlan(
        warmup_steps=section.warmup_steps,
        tokens_per_sample=section.tokens_per_sample,
        num_layers=section.num_layers,
        hidden_size=section.hidden_size,
        recomputation=words[section.recomputation],
        peak_tflops=section.peak_tflops,
        count_flops_at=section.count_flops_at,
    )


def idle_rates(config: Config) -> list[str]:
    """Keys of the speed that nobody is told."""
    if telemetry_plan(config.settings).is_wanted:
        return []
    keys = [key for key in config.given if key.startswith("timers.throughput.") and not key.endswith(".enabled")]
    return [
        f"{config.origin(key)}: {key} has no effect here: speed is told nowhere (steps_per_print, bench_steps "
        "and the monitors are off)"
        for key in keys
    ]


def telemetry_rows(telemetry: TelemetryPlan) -> Iterator[tuple[str, Any]]:
    """Every value under the key that sets it."""
    yield "steps_per_print", telemetry.steps_per_print or "never"
    yield "wall_clock_breakdown", telemetry.wall_clock_breakdown
    yield "memory_breakdown", telemetry.memory_breakdown
    yield "bench_steps", telemetry.bench_steps or "off"
    yield "timers.throughput.enabled", telemetry.throughput
    if telemetry.throughput:
        yield from _rate_rows(telemetry.rates)
    yield from _monitor_rows("tensorboard", telemetry.tensorboard, "output_path", "job_name")
    if telemetry.tensorboard.enabled:
        yield "tensorboard.gradient_histograms", telemetry.gradient_histograms or "off"
    yield from _monitor_rows("csv_monitor", telemetry.csv_monitor, "output_path", "job_name")
    yield from _monitor_rows("jsonl_monitor", telemetry.jsonl_monitor, "output_path", "job_name")
    yield from _monitor_rows("wandb", telemetry.wandb, "group", "team", "project")
    names = ("project", "workspace", "experiment_name", "experiment_key", "mode")
    yield from _monitor_rows("comet", telemetry.comet, *names)
    if telemetry.comet.enabled:
        yield "comet.samples_log_interval", telemetry.comet.samples_log_interval
        yield "comet.online", telemetry.comet.online
        yield "comet.api_key", "(hidden)" if telemetry.comet.api_key else "(default)"


def _rate_rows(rates: RatePlan) -> Iterator[tuple[str, Any]]:
    section = "timers.throughput"
    yield f"{section}.warmup_steps", rates.warmup_steps
    yield f"{section}.tokens_per_sample", rates.tokens_per_sample or "(counted)"
    yield f"{section}.num_layers", rates.num_layers or "(from the model)"
    yield f"{section}.hidden_size", rates.hidden_size or "(from the model)"
    yield (
        f"{section}.recomputation",
        "(seen in the first step)" if rates.recomputation == "auto" else rates.recomputation,
    )
    yield f"{section}.peak_tflops", rates.peak_tflops or "(from the device)"
    yield f"{section}.count_flops_at", rates.count_flops_at or "off"


def _monitor_rows(section: str, monitor: MonitorPlan | CometPlan, *names: str) -> Iterator[tuple[str, Any]]:
    yield f"{section}.enabled", monitor.enabled
    if monitor.enabled:
        yield from ((f"{section}.{name}", getattr(monitor, name) or "(default)") for name in names)
