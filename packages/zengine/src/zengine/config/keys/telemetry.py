"""Keys of what is measured and where it is written: monitors, throughput, profilers.

A new monitor is a settings class and a field of `MonitorKeys`; the plan has the same fields.
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
    return "(seen in the first step)" if recomputation == "auto" else recomputation


@attrs.frozen(kw_only=True)
class EventFiles:
    """csv_monitor: a file for each tag."""

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
        COUNT, 0, "steps between two histograms of the gradient norms of the layers; 0: none", empty="off"
    )


@attrs.frozen(kw_only=True)
class RunFolder:
    """jsonl_monitor, a section of ours: a folder that tells of the run, for programs."""

    enabled: bool = setting(TRUTH, False, "write run.json at start and a line of events.jsonl a step")
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
    samples_log_interval: int = setting(whole(1), 100, "samples between two points of a curve, at least")
    project: str = setting(
        null_or(TEXT, ""), "", "project of the experiment; empty: the package's own setting", empty="(default)"
    )
    workspace: str = setting(
        null_or(TEXT, ""), "", "workspace of the project; empty: the package's own setting", empty="(default)"
    )
    api_key: str = setting(
        null_or(TEXT, ""),
        "",
        "better left to COMET_API_KEY; never written to run.json",
        show=_secret_text,
        secret=True,
    )
    experiment_name: str = setting(
        null_or(TEXT, ""), "", "name of the experiment; empty: one is made up", empty="(default)"
    )
    experiment_key: str = setting(null_or(TEXT, ""), "", "key of an experiment to go on with", empty="(default)")
    online: bool = setting(null_or(TRUTH, True), True, "false: into a file, which can be uploaded later")
    mode: str = setting(
        null_or(choice("get", "create", "get_or_create"), ""),
        "",
        "whether the experiment must, or must not, exist",
        empty="(default)",
    )


@attrs.frozen(kw_only=True)
class ThroughputSection:
    """timers.throughput.  All keys but `enabled` are ours."""

    enabled: bool = setting(TRUTH, True, "measure samples, tokens and FLOPs per second")
    warmup_steps: int = setting(whole(1), 2, "first steps that are not measured")
    tokens_per_sample: int = setting(
        COUNT, 0, "0: counted, from the first integer tensor [batch, seq] of forward", empty="(counted)"
    )
    num_layers: int = setting(
        COUNT, 0, "for the attention's FLOPs; 0: from the model's own config", empty="(from the model)"
    )
    hidden_size: int = setting(
        COUNT, 0, "for the attention's FLOPs; 0: from the model's own config", empty="(from the model)"
    )
    recomputation: bool | str = setting(
        literal(TRUTH, "auto"),
        "auto",
        "whether backward computes activations again; auto: look in the first step",
        show=_recomputation_text,
    )
    peak_tflops: float = setting(
        number(0), 0.0, "of one device, for the MFU; 0: from a table of GPUs, in bf16", empty="(from the device)"
    )
    count_flops_at: int = setting(
        COUNT, 0, "step whose FLOPs are counted, operation by operation; 0: none", empty="off"
    )


@attrs.frozen(kw_only=True)
class Timers:
    """timers."""

    throughput: ThroughputSection = section(
        ThroughputSection,
        {
            "synchronized": ignored(
                TRUTH, True, why="a step is timed from boundary to boundary, and nothing is waited for"
            )
        },
        switch="enabled",
    )


RANKS = list_of(COUNT, "a list of ranks")


@attrs.frozen(kw_only=True)
class FlopsProfilerSection:
    """flops_profiler: one step counted module by module."""

    enabled: bool = setting(TRUTH, False, "count the operations of one step, by module")
    recompute_fwd_factor: float = setting(number(0), 0.0, "forwards that a backward does again, for the formula")
    profile_step: int = setting(COUNT, 1, "steps that are done before the one that is counted")
    module_depth: int = setting(whole(-1), -1, "deepest level of modules in the table; -1 = all")
    top_modules: int = setting(COUNT, 1, "classes named for each level, those with most first")
    detailed: bool = setting(TRUTH, True, "a line for every module")
    output_file: str = setting(
        null_or(TEXT, ""), "", "file of the table; empty: the standard output", empty="(default)"
    )


@attrs.frozen(kw_only=True)
class Profiler:
    """profiler: a key of ours; a window of steps under torch's profiler, and of memory."""

    enabled: bool = setting(TRUTH, False, "record a window of steps as a trace for chrome://tracing or Perfetto")
    start_step: int = setting(whole(1), 3, "first step that is recorded, counted from 1")
    steps: int = setting(whole(1), 2, "steps that are recorded")
    folder: str = setting(
        null_or(TEXT, ""), "", "folder of the traces; empty: profile/ in the run's folder", empty="(default)"
    )
    ranks: tuple[int, ...] = setting(RANKS, (0,), "ranks that record; []: all", empty="(all)")
    record_shapes: bool = setting(TRUTH, False, "with the shapes of operands")
    with_stack: bool = setting(TRUTH, False, "with the lines of Python that called; slow")
    profile_memory: bool = setting(TRUTH, False, "with every allocation")
    memory_snapshot: bool = setting(TRUTH, False, "CUDA: also the allocator's history, for pytorch.org/memory_viz")


@attrs.frozen(kw_only=True)
class CommsLogger:
    """comms_logger."""

    enabled: bool = setting(TRUTH, False, "count calls, bytes and time of collectives")
    prof_all: bool = setting(TRUTH, True, "false: only those of prof_ops")
    prof_ops: tuple[str, ...] = setting(
        NAMES, (), "names of the operations to count where prof_all is false", empty="(all)"
    )
    verbose: bool = setting(TRUTH, False, "log a line for each collective that is counted")
    debug: bool = setting(TRUTH, False, "with its label in the engine in those lines")

    @property
    def counts_anything(self) -> bool:
        """At least one operation is counted."""
        return self.enabled and bool(self.prof_all or self.prof_ops)

    @property
    def ops(self) -> tuple[str, ...]:
        """Operations that are counted; () = all."""
        return () if self.prof_all else self.prof_ops


@attrs.frozen(kw_only=True, slots=False)
class MonitorKeys:
    """Keys of the top level that need no resolving: `TelemetryPlan` has the same fields."""

    steps_per_print: int = setting(INTERVAL, 0, "optimizer steps between console lines; 0 = never", empty="never")
    wall_clock_breakdown: bool = setting(TRUTH, False, "time forward, backward, communication and step")
    memory_breakdown: bool = setting(TRUTH, False, "memory at each phase")
    bench_steps: int = setting(
        COUNT, 0, "ours: measured steps after which a summary is printed; 0 = never", empty="off"
    )
    tensorboard: TensorBoard = section(TensorBoard, switch="enabled")
    csv_monitor: EventFiles = section(EventFiles, switch="enabled")
    jsonl_monitor: RunFolder = section(RunFolder, switch="enabled")
    wandb: Wandb = section(Wandb, switch="enabled")
    comet: Comet = section(Comet, switch="enabled")


@attrs.frozen(kw_only=True, slots=False)
class ProfilingKeys:
    """Sections of the top level that measure a run."""

    timers: Timers = section(Timers)
    comms_logger: CommsLogger = section(CommsLogger, switch="enabled")
    flops_profiler: FlopsProfilerSection = section(FlopsProfilerSection, switch="enabled")
    profiler: Profiler = section(Profiler, switch="enabled")
