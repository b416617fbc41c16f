"""Keys of ZeRO: stages, collectives, offload, file I/O."""

from __future__ import annotations

import enum
import math
import sys

import attrs

from zengine.config.grammar.kinds import (
    COUNT,
    NAMES,
    POSITIVE,
    TEXT,
    TRUTH,
    Mismatch,
    ValueKind,
    choice,
    literal,
    null_or,
    number,
    whole,
)
from zengine.config.grammar.table import (
    Row,
    ignored,
    renamed,
    section,
    section_of,
    setting,
)


def _name_of(moment: enum.Enum) -> object:
    return moment.value


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
    """zero_optimization.leaf_module: modules that stage 3 gathers as one unit, regardless of size."""

    classes: tuple[str, ...] = setting(
        NAMES, (), "classes of the modules, with or without the Python path", empty="(none)"
    )
    names: tuple[str, ...] = setting(NAMES, (), "paths of the modules in the model", empty="(none)")
    name_suffixes: tuple[str, ...] = setting(NAMES, (), "suffixes of the modules' paths", empty="(none)")


OVERLAPS = "reads and writes always overlap the update"

OFFLOAD_OPTIMIZER: dict[str, Row] = {
    "pipeline_read": ignored(TRUTH, True, why=OVERLAPS),
    "pipeline_write": ignored(TRUTH, True, why=OVERLAPS),
    "fast_init": ignored(TRUTH, why="states are written when they are created"),
}


@attrs.frozen(kw_only=True)
class OffloadOptimizer:
    """zero_optimization.offload_optimizer: offload of masters, optimizer states and gradients."""

    device: str = setting(OFFLOAD, "none", "where they are stored; without a GPU everything is on the CPU")
    nvme_path: str = setting(
        null_or(TEXT, ""), "", "folder on a local drive; required for nvme", plan="directory", empty="(none)"
    )
    # DeepSpeed's default is false, which makes every copy synchronous.
    pin_memory: bool = setting(TRUTH, True, "page-locked host memory", plan="pin")
    ratio: float = setting(number(0, 1), 1.0, "fraction of the elements that are offloaded")
    buffer_count: int = setting(POSITIVE, 3, "nvme: update groups in memory at a time, at least 2")
    super_offload: bool = setting(
        TRUTH, False, "cpu: speculative update during the last backward, rolled back if invalid"
    )
    # DeepSpeed's default is 0.8.
    cpuadam_cores_perc: float = setting(
        number(0, 1),
        0.0,
        "super_offload: fraction of the process's cores that the update uses; default: torch's number of threads",
        plan="core_share",
        empty="(torch's threads)",
    )


@attrs.frozen(kw_only=True)
class OffloadParam:
    """zero_optimization.offload_param: offload of weight shards at stage 3."""

    device: str = setting(OFFLOAD, "none", "where they are stored; without a GPU everything is on the CPU")
    nvme_path: str = setting(
        null_or(TEXT, ""), "", "folder on a local drive; required for nvme", plan="directory", empty="(none)"
    )
    pin_memory: bool = setting(
        TRUTH, True, "page-locked host memory; if both are on cpu, offload_optimizer's value applies", plan="pin"
    )
    # DeepSpeed's default is a billion: with it "nvme" leaves most models on the host.
    max_in_cpu: int = setting(
        COUNT, 0, "nvme: elements of a rank's weights that stay on the host", plan="host_weight_numel"
    )
    buffer_count: int = setting(
        POSITIVE,
        5,
        "nvme: times buffer_size, elements of weights in host memory on their way; a larger shard passes alone",
        plan="weight_buffer_count",
    )
    buffer_size: int = setting(POSITIVE, 100_000_000, "nvme: see buffer_count", plan="weight_buffer_numel")


# DeepSpeed also takes the keys with the prefix "stage3_" by the names of its fields.
FIELD_NAMES: dict[str, ValueKind] = {
    "prefetch_bucket_size": COUNT,
    "param_persistence_threshold": COUNT,
    "model_persistence_threshold": COUNT,
    "max_live_parameters": COUNT,
    "max_reuse_distance": COUNT,
    "gather_16bit_weights_on_model_save": TRUTH,
    "module_granularity_threshold": COUNT,
    "use_all_reduce_for_fetch_params": TRUTH,
    "allgather_sequential": TRUTH,
}

ZERO: dict[str, Row] = {
    "contiguous_gradients": ignored(TRUTH, True, why="autograd writes into flat gradient buffers, without a copy"),
    "grad_hooks": ignored(TRUTH, True, why="gradients are always reduced by autograd's hooks"),
    "reduce_scatter": ignored(TRUTH, True, why="sharded gradients are always reduce-scattered"),
    "use_multi_rank_bucket_allreduce": ignored(TRUTH, True, why="a bucket always may span several owners"),
    "allgather_partitions": ignored(TRUTH, True, why="updated weights are always all-gathered"),
    "round_robin_gradients": ignored(TRUTH, False, why="every rank owns, and copies, an equal part of every bucket"),
    "compute_grad_norm": ignored(TRUTH, True, why="every step report has the norm"),
    "parameter_alignment": ignored(TRUTH, why="the layout sets the padding"),
    "elastic_checkpoint": ignored(TRUTH, why="every checkpoint loads at any world size"),
    "legacy_stage1": ignored(TRUTH, False, why="there is one stage 1"),
    "stage3_module_granularity_threshold": ignored(COUNT, why="stage3_unit_size sets the size of units"),
    "stage3_use_all_reduce_for_fetch_params": ignored(TRUTH, False, why="units are always all-gathered"),
    "stage3_allgather_sequential": ignored(TRUTH, False, why="units are gathered in the order of their use"),
    "memory_efficient_linear": ignored(TRUTH, True, why="autograd saves addresses of weights for every module"),
    "override_module_apply": ignored(TRUTH, why="no method of torch is patched"),
    "log_trace_cache_warnings": ignored(TRUTH, False, why="a step with another order of modules is only slower"),
    "stage3_gather_16bit_weights_on_model_save": ignored(TRUTH, why="whole weights are saved in any case"),
    "mics_shard_size": renamed(whole(-1), "shard_group_size", convert=lambda size: max(size, 0)),
    "mics_hierarchical_params_gather": ignored(TRUTH, False, why="weights are gathered only inside a shard group"),
    "pipeline_loading_checkpoint": ignored(TRUTH, False, why="loading always streams shards"),
    "save_muon_momentum_buffer_in_memory": ignored(TRUTH, False, why="momentum is placed with the optimizer states"),
    "enable_sanity_checks": ignored(TRUTH, False, why="sanity checks are always on"),
    "cpu_offload": renamed(TRUTH, "offload_optimizer", "device", convert=lambda on: "cpu" if on else "none"),
    "cpu_offload_param": renamed(TRUTH, "offload_param", "device", convert=lambda on: "cpu" if on else "none"),
    "cpu_offload_params": renamed(TRUTH, "offload_param", "device", convert=lambda on: "cpu" if on else "none"),
    "cpu_offload_use_pin_memory": renamed(TRUTH, "offload_optimizer", "pin_memory"),
    "stage3_gather_fp16_weights_on_model_save": renamed(TRUTH, "stage3_gather_16bit_weights_on_model_save"),
    "find_unused_parameters": renamed(TRUTH, "ignore_unused_parameters"),
    **{name: renamed(kind, f"stage3_{name}", what="another name") for name, kind in FIELD_NAMES.items()},
}


FROM_SIZE = "(from the model's size)"
MEASURED = "measured"  # reduce_bucket_size: from the link


def _or_unlimited(numel: int) -> object:
    return "(unlimited)" if numel == sys.maxsize else numel


def _or_working_set(numel: int | None) -> object:
    return "(the running call and the next)" if numel is None else numel


@attrs.frozen(kw_only=True)
class LoCo:
    """zero_optimization.zeropp_loco_param: error feedback of gradients in 4 bits (Xie et al. 2024)."""

    err_beta: float = setting(
        number(0, 1),
        1.0,
        "weight of past errors in their moving average; below 1 turns it on (usual: 0.8)",
        plan="gradient_error_beta",
    )
    reset_T: int = setting(  # noqa: N815  # DeepSpeed's name
        whole(1), 1024, "reductions after which errors are cleared", plan="gradient_error_reset"
    )


@attrs.frozen(kw_only=True)
class ZenFlow:
    """zero_optimization.zenflow: important columns are updated on the device, the rest later on the CPU."""

    topk_ratio: float = setting(
        number(0, 1), 0.1, "fraction of each matrix's columns that every step updates on the device; 0: off"
    )
    select_strategy: str = setting(
        choice("auto", "step", "epoch"), "auto", "unit of select_interval: step or epoch; auto: epoch"
    )
    select_interval: int = setting(
        COUNT, 0, "steps or epochs from one selection of columns to the next; auto: 1 epoch", empty="auto"
    )
    update_interval: int = setting(
        COUNT,
        0,
        "steps from one update of the rest to the next; auto: until auto_ratio of the matrices have a rest whose "
        "gradients have piled up to those of a column in one step",
        plan="update_every",
        empty="auto",
    )
    overlap_step: bool = setting(
        TRUTH,
        False,
        "update the rest in a thread; the model shows it at the next update of the rest, or before a selection",
        plan="overlap",
    )
    offload: bool = setting(TRUTH, False, "keep the columns' moments on the CPU between steps")
    auto_ratio: float = setting(number(0, 1), 0.99, "update_interval auto: see there", plan="ripe_share")
    full_warm_up_rounds: int = setting(COUNT, 0, "first steps, which update everything", plan="warm_up")
    pt_reserved_cores_perc: float = setting(
        number(0, 1),
        0.5,
        "overlap_step: fraction of the cores that the thread leaves to PyTorch",
        plan="reserved_share",
    )
    steps_per_epoch: int = setting(
        null_or(COUNT, 0),
        0,
        "steps of an epoch; default: of training_data; without it columns are selected once",
        empty="(of training_data)",
    )


NO_ZENFLOW = ZenFlow(topk_ratio=0.0)


@attrs.frozen(kw_only=True)
class Zero:
    """zero_optimization: sharding and offload.  `plan=` names a field of `ZeroPolicy`, or of `Offload`."""

    stage: int = setting(
        STAGE, 0, "0: no sharding; 1: optimizer states are sharded; 2: also gradients; 3: also weights"
    )
    reduce_bucket_size: int | str = setting(
        literal(POSITIVE, MEASURED),
        0,
        "elements of a reduction bucket, at least a parameter; default: derived from the model; "
        f'"{MEASURED}": at most that, chosen for the network between hosts (stages 0 to 2; the last bits of the norm '
        "then depend on the network)",
        plan="bucket_numel",
        empty=FROM_SIZE,
    )
    # DeepSpeed's default is 500 million, which has no effect there with a torch that gathers into one tensor.
    allgather_bucket_size: int = setting(
        POSITIVE,
        0,
        "elements of one message of updated weights, stages 1 and 2; default: a reduction bucket, in place",
        plan="gather_numel",
        empty="(a bucket)",
    )
    # DeepSpeed's default is false below stage 3; here overlap does not change the result.
    overlap_comm: bool = setting(null_or(TRUTH, True), True, "overlap the reduction with backward", plan="overlap")
    # Ours: DeepSpeed has no such key. "micro_step" makes stages 0, 1 and 2 equal bit for bit.
    reduce_at: str = setting(
        null_or(choice("micro_step", "boundary"), ""),
        "",
        "reduce gradients after each backward, or once per step (stages 0 and 1); default: once per step where both "
        "are possible and gradient_accumulation_steps is not 1",
        empty="(by stage)",
        show=_name_of,
    )
    ignore_unused_parameters: bool = setting(
        TRUTH, True, "false: raise if a parameter has no gradient", plan="ignore_unused"
    )
    stage3_prefetch_bucket_size: int = setting(
        COUNT, 50_000_000, "elements gathered ahead of use, at least one unit; 0: none", plan="prefetch_numel"
    )
    stage3_param_persistence_threshold: int = setting(
        COUNT, 100_000, "parameters with fewer elements are not sharded", plan="persist_numel"
    )
    stage3_model_persistence_threshold: int = setting(
        COUNT, sys.maxsize, "total elements of unsharded parameters", plan="persist_total_numel", show=_or_unlimited
    )
    # DeepSpeed's default is a billion for both: with it stage 3 keeps most models whole, and saves nothing.
    stage3_max_live_parameters: int | None = setting(
        null_or(COUNT, None),
        None,
        "elements kept gathered after forward; default: those of the running call and of the next; a billion if "
        "stage3_max_reuse_distance is given",
        plan="max_live_numel",
        show=_or_working_set,
    )
    stage3_max_reuse_distance: int | None = setting(
        null_or(COUNT, None),
        None,
        "elements used until the next use of a unit, above which it is released; default: a billion",
        plan="max_reuse_numel",
    )
    # Ours: DeepSpeed gathers module by module.
    stage3_unit_size: int = setting(
        COUNT,
        0,
        "most elements gathered as one unit; default: derived from the model",
        plan="unit_numel",
        empty=FROM_SIZE,
    )
    # Ours: DeepSpeed called it mics_shard_size.
    shard_group_size: int = setting(COUNT, 0, "ranks over which one copy is sharded; 0: all", empty="(all ranks)")
    zero_hpz_partition_size: int = setting(
        POSITIVE,
        1,
        "ranks of a node that keep a secondary copy for the gather in backward; 1: none",
        plan="secondary_group_size",
        empty=1,
    )
    zero_quantized_weights: bool = setting(TRUTH, False, "gather weights in 8 bits", plan="weight_bits", show=bool)
    zero_quantized_nontrainable_weights: bool = setting(
        TRUTH, False, "gather frozen weights in 8 bits", plan="frozen_weight_bits", show=bool
    )
    zero_quantized_gradients: bool = setting(
        TRUTH, False, "reduce gradients in 4 bits, within and between nodes", plan="gradient_bits", show=bool
    )
    zeropp_loco_param: LoCo = section(LoCo)
    # DeepSpeed's default is a billion; here a bucket is the minimum, and larger groups overlap less.
    sub_group_size: int = setting(
        COUNT,
        0,
        "elements of offloaded states that are updated at a time; at least a bucket",
        plan="offload.step_numel",
        empty="(a bucket)",
    )
    load_from_fp32_weights: bool = setting(
        TRUTH,
        True,
        "false: a loaded checkpoint's masters are rounded to the dtype of the weights",
        plan="loads_full_masters",
    )
    leaf_module: LeafModule = section(LeafModule)
    offload_optimizer: OffloadOptimizer = section(
        OffloadOptimizer, OFFLOAD_OPTIMIZER, switch="device", off=("none", None)
    )
    offload_param: OffloadParam = section(OffloadParam, switch="device", off=("none", None))
    zenflow: ZenFlow = attrs.field(default=NO_ZENFLOW, metadata={"row": section_of(ZenFlow)})  # given: on


ZERO_SHORTHAND: dict[bool, dict[str, object]] = {True: {"stage": 1}, False: {"stage": 0}}

AIO: dict[str, Row] = {
    "single_submit": ignored(TRUTH, True, why="every call is submitted by itself, by a thread of its own"),
    "overlap_events": ignored(TRUTH, True, why="a call starts when any other has ended"),
    "use_gds": ignored(TRUTH, False, why="files always pass through the host"),
}


@attrs.frozen(kw_only=True)
class Aio:
    """aio: file I/O for nvme."""

    block_size: int = setting(
        whole(1, 1 << 30), 1 << 20, "bytes of one call, rounded up to whole pages of 4 KiB", plan="block_bytes"
    )
    queue_depth: int = setting(whole(1), 8, "calls in flight for each of intra_op_parallelism")
    intra_op_parallelism: int = setting(
        whole(1),
        1,
        "times queue_depth, calls in flight of a rank, each in a thread of its own",
        plan="num_threads",
        aliases=("thread_count",),
    )


@attrs.frozen(kw_only=True, slots=False)
class ZeroKeys:
    """Sections of the top level about ZeRO."""

    zero_optimization: Zero = section(Zero, ZERO, shorthand=ZERO_SHORTHAND)
    aio: Aio = section(Aio, AIO)
