"""The settings that this engine honours, one class a section, one field a key.

Names, types and meanings are DeepSpeed's, so that a config can move in both directions.  Defaults are too, except
where a comment says otherwise.  An empty name or a zero stands for "not given" where a value is derived later; who
needs to know whether a default was typed asks `Config.given`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import attrs

import zckpt
from zengine.config.activation_settings import ActivationCheckpointing
from zengine.config.data_settings import CurriculumLearning, DataEfficiency
from zengine.config.kinds import (
    DTYPE,
    MAPPING,
    TEXT,
    TRUTH,
    Kind,
    Mismatch,
    choice,
    literal,
    null_or,
    number,
    whole,
)
from zengine.config.parallel_settings import ExpertParallel, TensorParallel
from zengine.config.pipeline_settings import Pipeline
from zengine.config.precision_settings import NAMES, Amp, Autocast, Float8
from zengine.config.profiling_settings import CommsLogger, FlopsProfiler, Profiler
from zengine.config.table import setting
from zengine.config.telemetry_settings import (
    Comet,
    EventFiles,
    RunFolder,
    TensorBoard,
    Timers,
    Wandb,
)


def _read_stage(value: object) -> int:
    try:
        stage: int = whole(-math.inf).read(value)
    except Mismatch as mismatch:
        raise Mismatch(mismatch.reason.replace("a whole number", "0, 1, 2 or 3"), mismatch.suggestion) from None
    if stage not in (0, 1, 2, 3):
        raise Mismatch("must be 0, 1, 2 or 3")
    return stage


def _read_interval(value: object) -> int:
    """Steps between prints; integrations write infinity, or null, for never."""
    if value is None or value == math.inf:
        return 0
    interval: int = whole(0).read(value)
    return interval


def _read_offload(value: object) -> str:
    device = "none" if value is None else TEXT.read(value)
    if device not in ("none", "cpu", "nvme"):
        raise Mismatch('must be "none", "cpu" or "nvme"')
    return str(device)


def _read_best(value: object) -> tuple[zckpt.Best, ...]:
    try:
        return tuple(map(zckpt.Best.parse, NAMES.read([value] if isinstance(value, str) else value)))
    except zckpt.CheckpointInputError as error:
        raise Mismatch(str(error), 'Write "loss", "loss:min" or "accuracy:max:3".') from None


BATCH = null_or(whole(1), 0)
STAGE = Kind("0, 1, 2 or 3", _read_stage)
BEST = Kind("a metric, as METRIC[:min|max[:N]], or a list of them", _read_best)
OFFLOAD = Kind('"none", "cpu", "nvme" or null', _read_offload)
INTERVAL = Kind("a whole number >= 0", _read_interval)
LEVELS = ("debug", "info", "warning", "error", "critical")


@attrs.frozen(kw_only=True)
class Optimizer:
    """optimizer: built by name; without it the caller brings one."""

    type: str = setting(TEXT, "", "name of the optimizer; empty: the caller brings one")
    params: Mapping[str, Any] = setting(MAPPING, {}, "keyword arguments of the optimizer")


@attrs.frozen(kw_only=True)
class Scheduler:
    """scheduler: learning-rate schedule built by name."""

    type: str = setting(TEXT, "", "name of the schedule; empty: none, or the caller's")
    params: Mapping[str, Any] = setting(MAPPING, {}, "keyword arguments of the schedule")


@attrs.frozen(kw_only=True)
class Fp16:
    """fp16: half precision with loss scaling."""

    enabled: bool = setting(TRUTH, False, "train in float16")
    auto_cast: bool = setting(TRUTH, False, "cast floating inputs of forward to float16")
    loss_scale: float = setting(number(0), 0.0, "factor on the loss; 0 = dynamic")
    initial_scale_power: int = setting(whole(0, 126), 16, "a dynamic scale starts at 2 to this power")
    loss_scale_window: int = setting(whole(1), 1000, "clean steps before a dynamic scale doubles")
    hysteresis: int = setting(whole(1), 2, "overflows tolerated before the scale halves")
    consecutive_hysteresis: bool = setting(TRUTH, False, "a clean step refills the hysteresis")
    min_loss_scale: float = setting(number(above=0), 1.0, "a dynamic scale never falls below this")
    fp16_master_weights_and_grads: bool = setting(TRUTH, False, "no float32 masters; states stay float32")


@attrs.frozen(kw_only=True)
class Bf16:
    """bf16: bfloat16 training."""

    enabled: bool | str = setting(literal(TRUTH, "auto"), False, 'train in bfloat16; "auto": where it is faster')
    check_grad_overflow: bool = setting(TRUTH, True, "leave out an update with non-finite gradients")
    bf16_master_weights_and_grads: bool = setting(TRUTH, False, "no float32 masters; states stay float32")
    bf16_optimizer_states: bool = setting(TRUTH, False, "beside bf16 masters: optimizer states in bf16 too")


@attrs.frozen(kw_only=True)
class DataTypes:
    """data_types: dtypes that precision does not already decide."""

    grad_accum_dtype: str = setting(null_or(DTYPE, ""), "", "dtype of the gradient accumulators; default: masters'")
    param_dtype: str = setting(
        null_or(DTYPE, ""), "", "dtype of the weights; default: what fp16 or bf16 say, else the model's own"
    )
    buffer_dtype: str = setting(null_or(DTYPE, ""), "", "dtype of floating buffers; default: they keep theirs")
    # DeepSpeed keeps buffers only; here parameters stay too.
    keep_in_fp32_modules: tuple[str, ...] | str = setting(
        literal(NAMES, "auto"), "auto", "what stays float32, by parts of names; auto: what a Transformers model lists"
    )


@attrs.frozen(kw_only=True)
class LeafModule:
    """zero_optimization.leaf_module: modules that stage 3 gathers as one, whatever their size."""

    classes: tuple[str, ...] = setting(NAMES, (), "their classes, with or without the path")
    names: tuple[str, ...] = setting(NAMES, (), "their paths in the model")
    name_suffixes: tuple[str, ...] = setting(NAMES, (), "what their paths end with")


@attrs.frozen(kw_only=True)
class OffloadOptimizer:
    """zero_optimization.offload_optimizer: masters, optimizer states and gradients that leave the device."""

    device: str = setting(OFFLOAD, "none", "where they live; on a machine without GPU everything is on the CPU")
    nvme_path: str = setting(null_or(TEXT, ""), "", "folder on a local drive, needed for nvme")
    # DeepSpeed's default is false, which makes every copy wait.
    pin_memory: bool = setting(TRUTH, True, "page-locked host memory")
    ratio: float = setting(number(0, 1), 1.0, "share of the elements whose states leave")
    buffer_count: int = setting(whole(1), 3, "nvme: step calls whose states are in memory at once, at least 2")
    super_offload: bool = setting(TRUTH, False, "cpu: update during the last backward, and undo where that was wrong")


@attrs.frozen(kw_only=True)
class OffloadParam:
    """zero_optimization.offload_param: the shards of weights that rest at stage 3."""

    device: str = setting(OFFLOAD, "none", "where they live; on a machine without GPU everything is on the CPU")
    nvme_path: str = setting(null_or(TEXT, ""), "", "folder on a local drive, needed for nvme")
    pin_memory: bool = setting(
        TRUTH, True, "page-locked host memory; offload_optimizer's counts where both are on cpu"
    )


@attrs.frozen(kw_only=True)
class Aio:
    """aio: how files are read and written (nvme)."""

    intra_op_parallelism: int = setting(whole(1), 8, "threads that read and write, for each rank")


@attrs.frozen(kw_only=True)
class Zero:
    """zero_optimization: what each rank keeps."""

    stage: int = setting(STAGE, 0, "0: everything; sharded are 1: optimizer states, 2: gradients too, 3: weights too")
    reduce_bucket_size: int = setting(whole(1), 0, "elements reduced at once; default: derived from the model")
    # DeepSpeed's default is false below stage 3; here overlap changes no bit of the result.
    overlap_comm: bool = setting(null_or(TRUTH, True), True, "reduce while backward still runs")
    # Ours: DeepSpeed has no such key. "micro_step" makes stages 0, 1 and 2 equal bit for bit.
    reduce_at: str = setting(choice("micro_step", "boundary"), "micro_step", "exchange after each backward, or once")
    ignore_unused_parameters: bool = setting(TRUTH, True, "false: a parameter without gradient is an error")
    stage3_prefetch_bucket_size: int = setting(whole(0), 50_000_000, "elements gathered ahead of their use")
    stage3_param_persistence_threshold: int = setting(whole(0), 100_000, "smaller parameters are never sharded")
    stage3_model_persistence_threshold: int = setting(whole(0), sys.maxsize, "elements of all those together")
    stage3_max_live_parameters: int = setting(whole(0), 1_000_000_000, "elements kept gathered after the forward")
    stage3_max_reuse_distance: int = setting(whole(0), 1_000_000_000, "elements used until then, else not kept")
    # Ours: DeepSpeed gathers module by module.
    stage3_unit_size: int = setting(whole(0), 0, "elements gathered as one at most; default: derived from the model")
    # Ours: DeepSpeed called it mics_shard_size.
    shard_group_size: int = setting(whole(0), 0, "ranks that hold one copy of what is sharded; 0: all")
    zero_hpz_partition_size: int = setting(whole(1), 1, "ranks of a node, which keep a copy to gather again; 1: none")
    zero_quantized_weights: bool = setting(TRUTH, False, "gather weights in 8 bits")
    zero_quantized_nontrainable_weights: bool = setting(TRUTH, False, "gather frozen weights in 8 bits")
    zero_quantized_gradients: bool = setting(TRUTH, False, "reduce gradients in 4 bits, inside nodes and between")
    # DeepSpeed's default is a billion; here a bucket is the least, and more at once hides less.
    sub_group_size: int = setting(whole(0), 0, "elements of one update of offloaded states; at least a bucket")
    leaf_module: LeafModule = LeafModule()
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    offload_param: OffloadParam = OffloadParam()


@attrs.frozen(kw_only=True)
class KeepSettings:
    """checkpoint.keep, a key of ours: which checkpoints stay when one is saved; without `last` all do."""

    last: int = setting(whole(0), 0, "the newest so many; 0: all, and the other keys have nothing to do")
    every: int = setting(whole(0), 0, "also steps divisible by it; 0: none")
    best: tuple[zckpt.Best, ...] = setting(BEST, (), 'also the best by a number of client_state["metrics"]')
    tags: tuple[str, ...] = setting(NAMES, (), "also tags that match one of these shell patterns")


@attrs.frozen(kw_only=True)
class CheckpointSettings:
    """checkpoint."""

    tag_validation: str = setting(
        choice("IGNORE", "WARN", "FAIL", fold=str.upper), "WARN", "when ranks save under different tags"
    )
    async_save: bool = setting(TRUTH, False, "write behind the loop's back, from a copy in host memory")
    keep: KeepSettings = KeepSettings()


@attrs.frozen(kw_only=True)
class Settings:
    """The top level of a config."""

    config_version: str = setting(TEXT, "", "release whose defaults hold for keys that are left out; see versions.py")
    train_batch_size: int = setting(BATCH, 0, "samples per optimizer step over all replicas")
    train_micro_batch_size_per_gpu: int = setting(BATCH, 0, "samples per forward on one rank")
    gradient_accumulation_steps: int = setting(BATCH, 0, "micro-steps per optimizer step")
    managed_gradient_accumulation: bool = setting(
        TRUTH, True, "count micro-steps to find the boundaries; else every step() is one"
    )
    dataloader_drop_last: bool = setting(TRUTH, False, "leave out the last, partial batch")
    # Ours: DeepSpeed leaves the copy to the loop.
    dataloader_prefetch: int = setting(
        whole(0), 1, "batches on the device ahead of their use; 0: they stay on the host"
    )
    gradient_clipping: float = setting(number(0), 1.0, "global L2 norm to clip to; 0 = off")
    prescale_gradients: bool = setting(TRUTH, False, "divide by the replicas before the reduction")
    gradient_predivide_factor: float = setting(number(above=0), 1.0, "part of the division done before it")
    sparse_gradients: bool = setting(TRUTH, False, "exchange rows of nn.Embedding(sparse=True) in place of all of it")
    gradient_allreduce_op: str = setting(choice("mean", "sum"), "mean", "how replicas' gradients combine")
    communication_data_type: str = setting(null_or(DTYPE, ""), "", "dtype on the wire; default: the model's")
    data_parallel_size: int = setting(BATCH, 0, "expected number of replicas; checked")
    sequence_parallel_size: int = setting(whole(1), 1, "ranks that share the tokens of each sample")
    steps_per_print: int = setting(INTERVAL, 0, "optimizer steps between console lines; 0 = never")
    wall_clock_breakdown: bool = setting(TRUTH, False, "time forward, backward, communication and step")
    memory_breakdown: bool = setting(TRUTH, False, "memory at each phase")
    dump_state: bool = setting(TRUTH, False, "print the resolved plan at start")
    disable_python_gc: bool = setting(TRUTH, False, "switch Python's cyclic collector off while the engine lives")
    log_level: str = setting(
        null_or(choice(*LEVELS, fold=str.lower), ""), "", "level of the loggers; empty: left alone"
    )
    optimizer: Optimizer = attrs.field(factory=Optimizer)
    scheduler: Scheduler = attrs.field(factory=Scheduler)
    fp16: Fp16 = attrs.field(factory=Fp16)
    bf16: Bf16 = attrs.field(factory=Bf16)
    amp: Amp = attrs.field(factory=Amp)
    torch_autocast: Autocast = attrs.field(factory=Autocast)
    fp8: Float8 = attrs.field(factory=Float8)
    data_types: DataTypes = attrs.field(factory=DataTypes)
    zero_optimization: Zero = attrs.field(factory=Zero)
    aio: Aio = attrs.field(factory=Aio)
    bench_steps: int = setting(whole(0), 0, "ours: measured steps after which a summary is printed; 0 = never")
    tensorboard: TensorBoard = attrs.field(factory=TensorBoard)
    csv_monitor: EventFiles = attrs.field(factory=EventFiles)
    jsonl_monitor: RunFolder = attrs.field(factory=RunFolder)
    wandb: Wandb = attrs.field(factory=Wandb)
    comet: Comet = attrs.field(factory=Comet)
    timers: Timers = attrs.field(factory=Timers)
    comms_logger: CommsLogger = attrs.field(factory=CommsLogger)
    flops_profiler: FlopsProfiler = attrs.field(factory=FlopsProfiler)
    profiler: Profiler = attrs.field(factory=Profiler)
    activation_checkpointing: ActivationCheckpointing = attrs.field(factory=ActivationCheckpointing)
    tensor_parallel: TensorParallel = attrs.field(factory=TensorParallel)
    pipeline: Pipeline = attrs.field(factory=Pipeline)
    expert_parallel: ExpertParallel = attrs.field(factory=ExpertParallel)
    checkpoint: CheckpointSettings = attrs.field(factory=CheckpointSettings)
    curriculum_learning: CurriculumLearning = attrs.field(factory=CurriculumLearning)
    data_efficiency: DataEfficiency = attrs.field(factory=DataEfficiency)
