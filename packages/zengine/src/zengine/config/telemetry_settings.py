"""The settings of what is measured and where it is written, one class a section; see schema.py."""

from __future__ import annotations

import attrs

from zengine.config.kinds import TEXT, TRUTH, choice, literal, null_or, number, whole
from zengine.config.table import setting


@attrs.frozen(kw_only=True)
class EventFiles:
    """csv_monitor: a file for each tag."""

    enabled: bool = setting(TRUTH, False, "write events")
    output_path: str = setting(null_or(TEXT, ""), "", "folder of the files")
    job_name: str = setting(null_or(TEXT, ""), "DeepSpeedJobName", "folder of this run inside it")


@attrs.frozen(kw_only=True)
class TensorBoard:
    """tensorboard: event files."""

    enabled: bool = setting(TRUTH, False, "write events")
    output_path: str = setting(null_or(TEXT, ""), "", "folder of the files")
    job_name: str = setting(null_or(TEXT, ""), "DeepSpeedJobName", "folder of this run inside it")
    # Ours: DeepSpeed writes no histograms.
    gradient_histograms: int = setting(
        whole(0), 0, "steps between two histograms of the gradient norms of the layers; 0: none"
    )


@attrs.frozen(kw_only=True)
class RunFolder:
    """jsonl_monitor, a section of ours: a folder that tells of the run, for programs."""

    enabled: bool = setting(TRUTH, False, "write run.json at start and a line of events.jsonl a step")
    output_path: str = setting(null_or(TEXT, ""), "", "folder of the runs")
    job_name: str = setting(null_or(TEXT, ""), "run", "folder of this run inside it")


@attrs.frozen(kw_only=True)
class Wandb:
    """wandb: Weights & Biases."""

    enabled: bool = setting(TRUTH, False, "log to Weights & Biases; needs the wandb package")
    group: str = setting(null_or(TEXT, ""), "", "group of runs")
    team: str = setting(null_or(TEXT, ""), "", "team that owns the run")
    project: str = setting(null_or(TEXT, ""), "deepspeed", "project of the run")


@attrs.frozen(kw_only=True)
class Comet:
    """comet: Comet experiments."""

    enabled: bool = setting(TRUTH, False, "log to Comet; needs the comet_ml package")
    samples_log_interval: int = setting(whole(1), 100, "samples between two points of a curve, at least")
    project: str = setting(null_or(TEXT, ""), "", "project of the experiment; empty: the package's own setting")
    workspace: str = setting(null_or(TEXT, ""), "", "workspace of the project; empty: the package's own setting")
    api_key: str = setting(null_or(TEXT, ""), "", "better left to COMET_API_KEY; never written to run.json")
    experiment_name: str = setting(null_or(TEXT, ""), "", "name of the experiment; empty: one is made up")
    experiment_key: str = setting(null_or(TEXT, ""), "", "key of an experiment to go on with")
    online: bool = setting(null_or(TRUTH, True), True, "false: into a file, which can be uploaded later")
    mode: str = setting(
        null_or(choice("get", "create", "get_or_create"), ""), "", "whether the experiment must, or must not, exist"
    )


@attrs.frozen(kw_only=True)
class Throughput:
    """timers.throughput.  All keys but `enabled` are ours."""

    enabled: bool = setting(TRUTH, True, "measure samples, tokens and FLOPs per second")
    warmup_steps: int = setting(whole(1), 2, "first steps that are not measured")
    tokens_per_sample: int = setting(whole(0), 0, "0: counted, from the first integer tensor [batch, seq] of forward")
    num_layers: int = setting(whole(0), 0, "for the attention's FLOPs; 0: from the model's own config")
    hidden_size: int = setting(whole(0), 0, "for the attention's FLOPs; 0: from the model's own config")
    recomputation: bool | str = setting(
        literal(TRUTH, "auto"), "auto", "whether backward computes activations again; auto: look in the first step"
    )
    peak_tflops: float = setting(number(0), 0.0, "of one device, for the MFU; 0: from a table of GPUs, in bf16")
    count_flops_at: int = setting(whole(0), 0, "step whose FLOPs are counted, operation by operation; 0: none")


@attrs.frozen(kw_only=True)
class Timers:
    """timers."""

    throughput: Throughput = attrs.field(factory=Throughput)
