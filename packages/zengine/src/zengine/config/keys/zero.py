"""Keys of ZeRO: stages, collectives, offload, and the reading and writing of files."""

from __future__ import annotations

import math
import sys

import attrs

from zengine.config.grammar.kinds import (
    ANYTHING,
    COUNT,
    NAMES,
    TEXT,
    TRUTH,
    Mismatch,
    ValueKind,
    choice,
    null_or,
    number,
    whole,
)
from zengine.config.grammar.table import Row, Section, all_ignored, fixed, ignored, renamed, section, setting


def _read_stage(value: object) -> int:
    try:
        stage: int = whole(-math.inf).read(value)
    except Mismatch as mismatch:
        raise Mismatch(mismatch.reason.replace("a whole number", "0, 1, 2 or 3"), mismatch.suggestion) from None
    if stage not in (0, 1, 2, 3):
        raise Mismatch("must be 0, 1, 2 or 3")
    return stage


def _read_offload(value: object) -> str:
    device = "none" if value is None else TEXT.read(value)
    if device not in ("none", "cpu", "nvme"):
        raise Mismatch('must be "none", "cpu" or "nvme"')
    return str(device)


STAGE = ValueKind("0, 1, 2 or 3", _read_stage, {"enum": [0, 1, 2, 3]})

OFFLOAD = ValueKind('"none", "cpu", "nvme" or null', _read_offload, {"enum": ["none", "cpu", "nvme", None]})


@attrs.frozen(kw_only=True)
class LeafModule:
    """zero_optimization.leaf_module: modules that stage 3 gathers as one, whatever their size."""

    classes: tuple[str, ...] = setting(NAMES, (), "their classes, with or without the path", empty="(none)")
    names: tuple[str, ...] = setting(NAMES, (), "their paths in the model", empty="(none)")
    name_suffixes: tuple[str, ...] = setting(NAMES, (), "what their paths end with", empty="(none)")


OVERLAPS = "reads and writes always overlap the update"

OFFLOAD_OPTIMIZER: dict[str, Row] = {
    "pipeline_read": ignored(TRUTH, True, why=OVERLAPS),
    "pipeline_write": ignored(TRUTH, True, why=OVERLAPS),
    "fast_init": ignored(TRUTH, why="states are written when they are first made"),
    "cpuadam_cores_perc": ignored(number(0, 1), why="torch's number of threads decides (torch.set_num_threads)"),
}


@attrs.frozen(kw_only=True)
class OffloadOptimizer:
    """zero_optimization.offload_optimizer: masters, optimizer states and gradients that leave the device."""

    device: str = setting(OFFLOAD, "none", "where they live; on a machine without GPU everything is on the CPU")
    nvme_path: str = setting(
        null_or(TEXT, ""), "", "folder on a local drive, needed for nvme", plan="directory", empty="(none)"
    )
    # DeepSpeed's default is false, which makes every copy wait.
    pin_memory: bool = setting(TRUTH, True, "page-locked host memory", plan="pin")
    ratio: float = setting(number(0, 1), 1.0, "share of the elements whose states leave")
    buffer_count: int = setting(whole(1), 3, "nvme: step calls whose states are in memory at once, at least 2")
    super_offload: bool = setting(TRUTH, False, "cpu: update during the last backward, and undo where that was wrong")


OFFLOAD_PARAM: dict[str, Row] = {
    "buffer_count": ignored(whole(1), why="stage3_prefetch_bucket_size says how far ahead weights are read"),
    "buffer_size": ignored(COUNT, why="a buffer is as large as the shard that it holds"),
    "max_in_cpu": ignored(COUNT, why="shards rest where device says, all of them"),
}


@attrs.frozen(kw_only=True)
class OffloadParam:
    """zero_optimization.offload_param: the shards of weights that rest at stage 3."""

    device: str = setting(OFFLOAD, "none", "where they live; on a machine without GPU everything is on the CPU")
    nvme_path: str = setting(
        null_or(TEXT, ""), "", "folder on a local drive, needed for nvme", plan="directory", empty="(none)"
    )
    pin_memory: bool = setting(
        TRUTH, True, "page-locked host memory; offload_optimizer's counts where both are on cpu", plan="pin"
    )


ZENFLOW = Section(
    rejection="ZenFlow is not available yet",
    keys=all_ignored(
        "",
        topk_ratio=number(0, 1),
        select_strategy=ANYTHING,
        select_interval=ANYTHING,
        update_interval=ANYTHING,
        overlap_step=TRUTH,
        offload=TRUTH,
        auto_ratio=number(0, 1),
        full_warm_up_rounds=COUNT,
        pt_reserved_cores_perc=number(0, 1),
    ),
)

LOCO = Section(
    rejection="error feedback for quantized gradients (LoCo) is not available yet",
    keys=all_ignored("", err_beta=number(0, 1), reset_T=COUNT),
)

ZERO: dict[str, Row] = {
    "contiguous_gradients": fixed(TRUTH, True, why="an engine without one flat gradient buffer"),
    "reduce_scatter": ignored(TRUTH, True, why="sharded gradients are always reduce-scattered"),
    "use_multi_rank_bucket_allreduce": ignored(TRUTH, True, why="a bucket may always span several owners"),
    "allgather_partitions": ignored(TRUTH, True, why="updated weights are always all-gathered"),
    "allgather_bucket_size": ignored(whole(1), why="weights are gathered in the buckets of the reduction"),
    "round_robin_gradients": ignored(TRUTH, False, why="it balances a copy to the host that is not made"),
    "load_from_fp32_weights": fixed(TRUTH, True, why="rebuilding masters from half-precision weights"),
    "compute_grad_norm": ignored(TRUTH, True, why="every step report holds the norm"),
    "parameter_alignment": ignored(TRUTH, why="the layout decides the padding"),
    "elastic_checkpoint": ignored(TRUTH, why="every checkpoint loads at any world size"),
    "legacy_stage1": fixed(TRUTH, False, why="the old stage 1"),
    "stage3_module_granularity_threshold": ignored(COUNT, why="units are chosen by size, see stage3_unit_size"),
    "stage3_use_all_reduce_for_fetch_params": ignored(TRUTH, False, why="units are always all-gathered"),
    "stage3_allgather_sequential": ignored(TRUTH, False, why="units are gathered in the order of their use"),
    "memory_efficient_linear": ignored(TRUTH, True, why="saved weights are addresses for every module"),
    "override_module_apply": ignored(TRUTH, why="no method of torch is replaced"),
    "log_trace_cache_warnings": ignored(TRUTH, False, why="a step that goes another way costs no more than time"),
    "stage3_gather_16bit_weights_on_model_save": ignored(TRUTH, why="saving never needs it"),
    "zeropp_loco_param": LOCO,
    "mics_shard_size": renamed(whole(-1), "shard_group_size", convert=lambda size: max(size, 0)),
    "mics_hierarchical_params_gather": ignored(TRUTH, False, why="weights are gathered inside a shard group only"),
    "pipeline_loading_checkpoint": ignored(TRUTH, False, why="loading streams shards in its own way"),
    "save_muon_momentum_buffer_in_memory": ignored(TRUTH, False, why="momentum lies where the optimizer's states do"),
    "enable_sanity_checks": ignored(TRUTH, False, why="the checks of this engine are always on"),
    "zenflow": ZENFLOW,
    "cpu_offload": renamed(TRUTH, "offload_optimizer", "device", convert=lambda on: "cpu" if on else "none"),
    "cpu_offload_param": renamed(TRUTH, "offload_param", "device", convert=lambda on: "cpu" if on else "none"),
    "cpu_offload_use_pin_memory": renamed(TRUTH, "offload_optimizer", "pin_memory"),
    "stage3_gather_fp16_weights_on_model_save": renamed(TRUTH, "stage3_gather_16bit_weights_on_model_save"),
}


FROM_SIZE = "(from the model's size)"


def _or_unlimited(numel: int) -> object:
    return "(unlimited)" if numel == sys.maxsize else numel


@attrs.frozen(kw_only=True)
class Zero:
    """zero_optimization: what each rank keeps.  `plan` names a field of `zpartition.ZeroPolicy`."""

    stage: int = setting(STAGE, 0, "0: everything; sharded are 1: optimizer states, 2: gradients too, 3: weights too")
    reduce_bucket_size: int = setting(
        whole(1), 0, "elements reduced at once; default: derived from the model", plan="bucket_numel", empty=FROM_SIZE
    )
    # DeepSpeed's default is false below stage 3; here overlap changes no bit of the result.
    overlap_comm: bool = setting(null_or(TRUTH, True), True, "reduce while backward still runs", plan="overlap")
    # Ours: DeepSpeed has no such key. "micro_step" makes stages 0, 1 and 2 equal bit for bit.
    reduce_at: str = setting(choice("micro_step", "boundary"), "micro_step", "exchange after each backward, or once")
    ignore_unused_parameters: bool = setting(
        TRUTH, True, "false: a parameter without gradient is an error", plan="ignore_unused"
    )
    stage3_prefetch_bucket_size: int = setting(
        COUNT, 50_000_000, "elements gathered ahead of their use", plan="prefetch_numel"
    )
    stage3_param_persistence_threshold: int = setting(
        COUNT, 100_000, "smaller parameters are never sharded", plan="persist_numel"
    )
    stage3_model_persistence_threshold: int = setting(
        COUNT, sys.maxsize, "elements of all those together", plan="persist_total_numel", show=_or_unlimited
    )
    stage3_max_live_parameters: int = setting(
        COUNT, 1_000_000_000, "elements kept gathered after the forward", plan="max_live_numel"
    )
    stage3_max_reuse_distance: int = setting(
        COUNT, 1_000_000_000, "elements used until then, else not kept", plan="max_reuse_numel"
    )
    # Ours: DeepSpeed gathers module by module.
    stage3_unit_size: int = setting(
        COUNT,
        0,
        "elements gathered as one at most; default: derived from the model",
        plan="unit_numel",
        empty=FROM_SIZE,
    )
    # Ours: DeepSpeed called it mics_shard_size.
    shard_group_size: int = setting(
        COUNT, 0, "ranks that hold one copy of what is sharded; 0: all", empty="(all ranks)"
    )
    zero_hpz_partition_size: int = setting(
        whole(1),
        1,
        "ranks of a node, which keep a copy to gather again; 1: none",
        plan="secondary_group_size",
        empty=1,
    )
    zero_quantized_weights: bool = setting(TRUTH, False, "gather weights in 8 bits", plan="weight_bits", show=bool)
    zero_quantized_nontrainable_weights: bool = setting(
        TRUTH, False, "gather frozen weights in 8 bits", plan="frozen_weight_bits", show=bool
    )
    zero_quantized_gradients: bool = setting(
        TRUTH, False, "reduce gradients in 4 bits, inside nodes and between", plan="gradient_bits", show=bool
    )
    # DeepSpeed's default is a billion; here a bucket is the least, and more at once hides less.
    sub_group_size: int = setting(
        COUNT,
        0,
        "elements of one update of offloaded states; at least a bucket",
        plan="offload.step_numel",
        empty="(a bucket)",
    )
    leaf_module: LeafModule = section(LeafModule)
    offload_optimizer: OffloadOptimizer = section(
        OffloadOptimizer, OFFLOAD_OPTIMIZER, switch="device", off=("none", None)
    )
    offload_param: OffloadParam = section(OffloadParam, OFFLOAD_PARAM, switch="device", off=("none", None))


ZERO_SHORTHAND: dict[bool, dict[str, object]] = {True: {"stage": 1}, False: {"stage": 0}}

AIO: dict[str, Row] = {
    "block_size": ignored(whole(1), why="files are read and written by the MiB"),
    "queue_depth": ignored(whole(1), why="each thread waits for one call at a time; set intra_op_parallelism"),
    "single_submit": ignored(TRUTH, why="there is no queue to submit to"),
    "overlap_events": ignored(TRUTH, True, why="transfers always overlap"),
    "use_gds": ignored(TRUTH, False, why="files always pass through the host"),
}


@attrs.frozen(kw_only=True)
class Aio:
    """aio: how files are read and written (nvme)."""

    intra_op_parallelism: int = setting(
        whole(1), 8, "threads that read and write, for each rank", plan="num_threads", aliases=("thread_count",)
    )


@attrs.frozen(kw_only=True, slots=False)
class ZeroKeys:
    """Sections of the top level about ZeRO."""

    zero_optimization: Zero = section(Zero, ZERO, shorthand=ZERO_SHORTHAND)
    aio: Aio = section(Aio, AIO)
