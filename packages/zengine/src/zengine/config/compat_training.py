"""Known keys that shape training and are not settings of ours: batch, gradients, precision, ZeRO, checkpoints.

Each says what a person needs to know when it is met: what it waits for, what happens anyway, or the new name.
"""

from __future__ import annotations

from zengine.config.kinds import ANYTHING, DTYPE, MAPPING, TEXT, TRUTH, null_or, number, whole
from zengine.config.table import (
    Entry,
    Section,
    all_without_effect,
    limited,
    no_effect,
    refused,
    renamed,
)

COUNT = whole(0)
ALWAYS_OFFERED = "every torch optimizer is accepted"

TOP: dict[str, Entry] = {
    "use_data_before_expert_parallelism": limited(
        TRUTH, False, why="a layout in which the ranks that share experts out are no neighbours"
    ),
    "vocabulary_size": no_effect(null_or(COUNT, 0), why="it only asks for advice on padding"),
    "seq_parallel_communication_data_type": no_effect(
        DTYPE, why="gradients of sequence ranks travel with the others', as communication_data_type says"
    ),
    "disable_allgather": no_effect(TRUTH, False, why="it lost its meaning before this engine existed"),
    "zero_allow_untested_optimizer": no_effect(TRUTH, True, why=ALWAYS_OFFERED),
    "zero_force_ds_cpu_optimizer": no_effect(TRUTH, False, why=ALWAYS_OFFERED),
}

OPTIMIZER: dict[str, Entry] = {
    "legacy_fusion": no_effect(TRUTH, False, why="there is one fusion, and it is always on"),
}

BF16: dict[str, Entry] = {
    "immediate_grad_update": no_effect(TRUTH, True, why="gradients are accumulated at once anyway"),
}

OVERLAPS = "reads and writes always overlap the update"
OFFLOAD_OPTIMIZER: dict[str, Entry] = {
    "pipeline_read": no_effect(TRUTH, True, why=OVERLAPS),
    "pipeline_write": no_effect(TRUTH, True, why=OVERLAPS),
    "fast_init": no_effect(TRUTH, why="states are written when they are first made"),
    "cpuadam_cores_perc": no_effect(number(0, 1), why="torch's number of threads decides (torch.set_num_threads)"),
}
OFFLOAD_PARAM: dict[str, Entry] = {
    "buffer_count": no_effect(whole(1), why="stage3_prefetch_bucket_size says how far ahead weights are read"),
    "buffer_size": no_effect(COUNT, why="a buffer is as large as the shard that it holds"),
    "max_in_cpu": no_effect(COUNT, why="shards rest where device says, all of them"),
}

ZENFLOW = Section(
    why_not="ZenFlow is not available yet",
    keys=all_without_effect(
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
    why_not="error feedback for quantized gradients (LoCo) is not available yet",
    keys=all_without_effect("", err_beta=number(0, 1), reset_T=COUNT),
)


ZERO: dict[str, Entry] = {
    "contiguous_gradients": limited(TRUTH, True, why="an engine without one flat gradient buffer"),
    "reduce_scatter": no_effect(TRUTH, True, why="sharded gradients are always reduce-scattered"),
    "use_multi_rank_bucket_allreduce": no_effect(TRUTH, True, why="a bucket may always span several owners"),
    "allgather_partitions": no_effect(TRUTH, True, why="updated weights are always all-gathered"),
    "allgather_bucket_size": no_effect(whole(1), why="weights are gathered in the buckets of the reduction"),
    "round_robin_gradients": no_effect(TRUTH, False, why="it balances a copy to the host that is not made"),
    "load_from_fp32_weights": limited(TRUTH, True, why="rebuilding masters from half-precision weights"),
    "compute_grad_norm": no_effect(TRUTH, True, why="every step report holds the norm"),
    "parameter_alignment": no_effect(TRUTH, why="the layout decides the padding"),
    "elastic_checkpoint": no_effect(TRUTH, why="every checkpoint loads at any world size"),
    "legacy_stage1": limited(TRUTH, False, why="the old stage 1"),
    "stage3_module_granularity_threshold": no_effect(COUNT, why="units are chosen by size, see stage3_unit_size"),
    "stage3_use_all_reduce_for_fetch_params": no_effect(TRUTH, False, why="units are always all-gathered"),
    "stage3_allgather_sequential": no_effect(TRUTH, False, why="units are gathered in the order of their use"),
    "memory_efficient_linear": no_effect(TRUTH, True, why="saved weights are addresses for every module"),
    "override_module_apply": no_effect(TRUTH, why="no method of torch is replaced"),
    "log_trace_cache_warnings": no_effect(TRUTH, False, why="a step that goes another way costs no more than time"),
    "stage3_gather_16bit_weights_on_model_save": no_effect(TRUTH, why="saving never needs it"),
    "zeropp_loco_param": LOCO,
    "mics_shard_size": renamed(whole(-1), "shard_group_size", convert=lambda size: max(size, 0)),
    "mics_hierarchical_params_gather": no_effect(TRUTH, False, why="weights are gathered inside a shard group only"),
    "pipeline_loading_checkpoint": no_effect(TRUTH, False, why="loading streams shards in its own way"),
    "save_muon_momentum_buffer_in_memory": no_effect(
        TRUTH, False, why="momentum lies where the optimizer's states do"
    ),
    "enable_sanity_checks": no_effect(TRUTH, False, why="the checks of this engine are always on"),
    "zenflow": ZENFLOW,
    "cpu_offload": renamed(TRUTH, "offload_optimizer", "device", convert=lambda on: "cpu" if on else "none"),
    "cpu_offload_param": renamed(TRUTH, "offload_param", "device", convert=lambda on: "cpu" if on else "none"),
    "cpu_offload_use_pin_memory": renamed(TRUTH, "offload_optimizer", "pin_memory"),
    "stage3_gather_fp16_weights_on_model_save": renamed(TRUTH, "stage3_gather_16bit_weights_on_model_save"),
}

AIO: dict[str, Entry] = {
    "block_size": no_effect(whole(1), why="files are read and written by the MiB"),
    "queue_depth": no_effect(whole(1), why="each thread waits for one call at a time; set intra_op_parallelism"),
    "single_submit": no_effect(TRUTH, why="there is no queue to submit to"),
    "overlap_events": no_effect(TRUTH, True, why="transfers always overlap"),
    "use_gds": no_effect(TRUTH, False, why="files always pass through the host"),
    "thread_count": renamed(whole(1), "intra_op_parallelism"),
}

CHECKPOINT: dict[str, Entry] = {
    "load_universal": no_effect(TRUTH, False, why="every checkpoint loads at any world size"),
    "use_node_local_storage": limited(TRUTH, False, why="checkpoints on each node's own disk"),
    "parallel_write": Section(
        keys={"pipeline_stage": no_effect(TRUTH, False, why="every rank always writes its own share")}
    ),
    "checkpoint_serialization": no_effect(TRUTH, True, why="the format has one serialization"),
    "writer": Section(
        why_not='checkpoint writers have no names; "checkpoint": {"async_save": true} writes behind the loop',
        keys=all_without_effect(
            "",
            type=TEXT,
            decoupled=TRUTH,
            io_buffer_size=whole(1),
            io_buffer_double=TRUTH,
            show_statistics=TRUTH,
            data_parallel=TEXT,
            io_multiplier=whole(1),
        ),
    ),
}

NEBULA = Section(keys={"enabled": limited(TRUTH, False, why="the Nebula service")}, switch="enabled", is_open=True)
DATASTATES = refused("the external engine DataStates is not supported", "Remove the section.")
ZERO_SHORTHAND: dict[bool, dict[str, object]] = {True: {"stage": 1}, False: {"stage": 0}}
BFLOAT16 = renamed(MAPPING, "bf16")
