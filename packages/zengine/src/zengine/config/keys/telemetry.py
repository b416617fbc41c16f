"""Keys of telemetry: monitors, throughput, profilers.

A new monitor is a settings class and a field of `MonitorKeys`; `TelemetryPlan` inherits the field.
"""

from __future__ import annotations

from typing import Any

import attrs

from zengine.config.grammar.kinds import COUNT, NAMES, TEXT, TRUTH, choice, list_of, literal, null_or, number, whole
from zengine.config.grammar.table import ignored, section, setting
from zengine.config.keys.training import INTERVAL


def _secret_text(secret: str) -> str:
    return "(hidden)" if secret else "(default)"


def _recomputation_text(recomputation: Any) -> Any:
    return "(detected in the first step)" if recomputation == "auto" else recomputation


@attrs.frozen(kw_only=True)
class EventFiles:
    """csv_monitor: one CSV file per tag."""

    enabled: bool = setting(TRUTH, False, "write events")
    output_path: str = setting(null_or(TEXT, ""), "", "folder of the files", empty="(default)")
    job_name: str = setting(null_or(TEXT, ""), "DeepSpeedJobName", "folder of this run inside it", empty="(default)")


@attrs.frozen(kw_only=True)
class TensorBoard:
    """tensorboard: event files."""

    enabled: bool = setting(TRUTH, False, "write events")
    output_path: str = setting(null_or(TEXT, ""), "", "folder of the files", empty="(default)")
    job_name: str = setting(null_or(TEXT, ""), "DeepSpeedJobName", "folder of this run inside it", empty="(default)")
    # Ours: DeepSpeed writes no histograms.
    gradient_histograms: int = setting(
        COUNT, 0, "steps between histograms of the layers' gradient norms; 0: none", empty="off"
    )


@attrs.frozen(kw_only=True)
class RunFolder:
    """jsonl_monitor, ours: machine-readable record of the run."""

    enabled: bool = setting(TRUTH, False, "write run.json at start and a line of events.jsonl per step")
    output_path: str = setting(null_or(TEXT, ""), "", "folder of the runs", empty="(default)")
    job_name: str = setting(null_or(TEXT, ""), "run", "folder of this run inside it", empty="(default)")


@attrs.frozen(kw_only=True)
class Wandb:
    """wandb: Weights & Biases."""

    enabled: bool = setting(TRUTH, False, "log to Weights & Biases; needs the wandb package")
    group: str = setting(null_or(TEXT, ""), "", "group of runs", empty="(default)")
    team: str = setting(null_or(TEXT, ""), "", "team that owns the run", empty="(default)")
    project: str = setting(null_or(TEXT, ""), "deepspeed", "project of the run", empty="(default)")


@attrs.frozen(kw_only=True)
class Comet:
    """comet: Comet experiments."""

    enabled: bool = setting(TRUTH, False, "log to Comet; needs the comet_ml package")
    samples_log_interval: int = setting(whole(1), 100, "least number of samples between two points of a curve")
    project: str = setting(
        null_or(TEXT, ""), "", "project of the experiment; empty: comet_ml's setting", empty="(default)"
    )
    workspace: str = setting(
        null_or(TEXT, ""), "", "workspace of the project; empty: comet_ml's setting", empty="(default)"
    )
    api_key: str = setting(
        null_or(TEXT, ""),
        "",
        "API key; prefer COMET_API_KEY; never written to run.json",
        show=_secret_text,
        secret=True,
    )
    experiment_name: str = setting(
        null_or(TEXT, ""), "", "name of the experiment; empty: generated", empty="(default)"
    )
    experiment_key: str = setting(null_or(TEXT, ""), "", "key of an experiment to continue", empty="(default)")
    online: bool = setting(null_or(TRUTH, True), True, "false: write a file for a later upload")
    mode: str = setting(
        null_or(choice("get", "create", "get_or_create"), ""),
        "",
        "get: the experiment must exist; create: it must not",
        empty="(default)",
    )


@attrs.frozen(kw_only=True)
class Mlflow:
    """mlflow, ours: MLflow runs."""

    enabled: bool = setting(TRUTH, False, "log to MLflow; needs the mlflow package")
    samples_log_interval: int = setting(whole(1), 100, "least number of samples between two points of a curve")
    tracking_uri: str = setting(
        null_or(TEXT, ""), "", "server, database or folder; empty: MLFLOW_TRACKING_URI or mlflow's", empty="(default)"
    )
    experiment: str = setting(
        null_or(TEXT, ""),
        "",
        'experiment of the run; empty: MLFLOW_EXPERIMENT_NAME or "Default"',
        empty="(default)",
    )
    run_name: str = setting(null_or(TEXT, ""), "", "name of the run; empty: generated", empty="(default)")
    run_id: str = setting(null_or(TEXT, ""), "", "id of a run to continue", empty="(default)")


@attrs.frozen(kw_only=True)
class Aim:
    """aim, ours: Aim runs."""

    enabled: bool = setting(TRUTH, False, "log to Aim; needs the aim package")
    repo: str = setting(
        null_or(TEXT, ""), "", "repository or aim:// address; empty: .aim here or AIM_REPO", empty="(default)"
    )
    experiment: str = setting(null_or(TEXT, ""), "", "experiment of the run; empty: aim's", empty="(default)")
    run_name: str = setting(null_or(TEXT, ""), "", "name of the run; empty: generated", empty="(default)")
    run_hash: str = setting(null_or(TEXT, ""), "", "hash of a run to continue", empty="(default)")


@attrs.frozen(kw_only=True)
class Trackio:
    """trackio, ours: trackio runs."""

    enabled: bool = setting(TRUTH, False, "log to trackio; needs the trackio package")
    project: str = setting(null_or(TEXT, "zengine"), "zengine", "project of the run")
    group: str = setting(null_or(TEXT, ""), "", "group of runs", empty="(default)")
    run_name: str = setting(
        null_or(TEXT, ""), "", "name of the run, which is continued if it exists; empty: generated", empty="(default)"
    )
    space_id: str = setting(null_or(TEXT, ""), "", "Hugging Face Space; empty: this machine", empty="(default)")


@attrs.frozen(kw_only=True)
class ThroughputSection:
    """timers.throughput: rates per second; ours, except for `enabled`."""

    enabled: bool = setting(TRUTH, True, "measure samples, tokens and FLOPs per second")
    warmup_steps: int = setting(whole(1), 2, "number of first steps to exclude")
    tokens_per_sample: int = setting(
        COUNT, 0, "tokens of a sample; 0: counted from forward's first integer tensor [batch, seq]", empty="(counted)"
    )
    num_layers: int = setting(
        COUNT, 0, "number of layers, for the attention's FLOPs; 0: from the model's config", empty="(from the model)"
    )
    hidden_size: int = setting(
        COUNT, 0, "hidden size, for the attention's FLOPs; 0: from the model's config", empty="(from the model)"
    )
    recomputation: bool | str = setting(
        literal(TRUTH, "auto"),
        "auto",
        "backward recomputes activations; auto: detected in the first step",
        show=_recomputation_text,
    )
    peak_tflops: float = setting(
        number(0),
        0.0,
        "peak of one device, for the MFU; 0: bf16 peak from a table of GPUs",
        empty="(from the device)",
    )
    count_flops_at: int = setting(COUNT, 0, "step whose FLOPs are counted by operation; 0: none", empty="off")


@attrs.frozen(kw_only=True)
class Timers:
    """timers: measurement of time."""

    throughput: ThroughputSection = section(
        ThroughputSection,
        {
            "synchronized": ignored(
                TRUTH, True, why="a step is timed from boundary to boundary, without synchronization"
            )
        },
        switch="enabled",
    )


RANKS = list_of(COUNT, "a list of ranks")


@attrs.frozen(kw_only=True)
class FlopsProfilerSection:
    """flops_profiler: FLOPs of one step by module."""

    enabled: bool = setting(TRUTH, False, "count the FLOPs of one step by module")
    recompute_fwd_factor: float = setting(number(0), 0.0, "forward passes recomputed in backward, for the formula")
    profile_step: int = setting(COUNT, 1, "number of steps before the profiled one", aliases=("step",))
    module_depth: int = setting(whole(-1), -1, "deepest level of modules in the table; -1 = all")
    top_modules: int = setting(COUNT, 1, "classes listed per level, the largest first")
    detailed: bool = setting(TRUTH, True, "a line for every module")
    output_file: str = setting(
        null_or(TEXT, ""), "", "file of the table; empty: the standard output", empty="(default)"
    )


@attrs.frozen(kw_only=True)
class Profiler:
    """profiler, ours: a window of steps under torch's profiler."""

    enabled: bool = setting(TRUTH, False, "record a window of steps as a trace for chrome://tracing or Perfetto")
    start_step: int = setting(whole(1), 3, "first recorded step, counted from 1")
    steps: int = setting(whole(1), 2, "number of recorded steps")
    folder: str = setting(
        null_or(TEXT, ""), "", "folder of the traces; empty: profile/ in the run's folder", empty="(default)"
    )
    ranks: tuple[int, ...] = setting(RANKS, (0,), "ranks that record a trace; []: all", empty="(all)")
    record_shapes: bool = setting(TRUTH, False, "record the shapes of operands")
    with_stack: bool = setting(TRUTH, False, "record the Python call stack; slow")
    profile_memory: bool = setting(TRUTH, False, "record every allocation")
    memory_snapshot: bool = setting(
        TRUTH, False, "CUDA: also write the allocator's history, for pytorch.org/memory_viz"
    )


@attrs.frozen(kw_only=True)
class CommsLogger:
    """comms_logger: statistics of collectives."""

    enabled: bool = setting(TRUTH, False, "count calls, bytes and time of collectives")
    prof_all: bool = setting(TRUTH, True, "count all operations; false: only those in prof_ops")
    prof_ops: tuple[str, ...] = setting(NAMES, (), "operations to count if prof_all is false", empty="(all)")
    verbose: bool = setting(TRUTH, False, "log a line per counted collective")
    debug: bool = setting(TRUTH, False, "add the engine's label to those lines")

    @property
    def counts_anything(self) -> bool:
        """True if at least one operation is counted."""
        return self.enabled and bool(self.prof_all or self.prof_ops)

    @property
    def ops(self) -> tuple[str, ...]:
        """Operations that are counted; () = all."""
        return () if self.prof_all else self.prof_ops


@attrs.frozen(kw_only=True, slots=False)
class MonitorKeys:
    """Keys of the top level that need no resolution: `TelemetryPlan` has the same fields."""

    steps_per_print: int = setting(INTERVAL, 0, "optimizer steps between console lines; 0: never", empty="never")
    wall_clock_breakdown: bool = setting(TRUTH, False, "time forward, backward, communication and step")
    memory_breakdown: bool = setting(TRUTH, False, "measure memory after each phase")
    bench_steps: int = setting(
        COUNT, 0, "ours: number of measured steps after which a summary is printed; 0: never", empty="off"
    )
    tensorboard: TensorBoard = section(TensorBoard, switch="enabled")
    csv_monitor: EventFiles = section(EventFiles, switch="enabled")
    jsonl_monitor: RunFolder = section(RunFolder, switch="enabled")
    wandb: Wandb = section(Wandb, switch="enabled")
    comet: Comet = section(Comet, switch="enabled")
    mlflow: Mlflow = section(Mlflow, switch="enabled")
    aim: Aim = section(Aim, switch="enabled")
    trackio: Trackio = section(Trackio, switch="enabled")


@attrs.frozen(kw_only=True, slots=False)
class ProfilingKeys:
    """Sections of the top level that measure a run."""

    timers: Timers = section(Timers)
    comms_logger: CommsLogger = section(CommsLogger, switch="enabled")
    flops_profiler: FlopsProfilerSection = section(FlopsProfilerSection, switch="enabled")
    profiler: Profiler = section(Profiler, switch="enabled")
