"""Keys of the run as a whole: batch sizes, gradients, optimizer, schedule, start and end.

Conventions of all settings classes: names, types and meanings are DeepSpeed's, so that a config is portable in both
directions.  So are the defaults, unless a comment states otherwise.  An empty name or a zero stands for "not given"
where a value is derived later; `Config.given` tells whether a default was written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from zengine.config.grammar.kinds import (
    ANYTHING,
    COUNT,
    DTYPE,
    MAPPING,
    TEXT,
    TRUTH,
    ValueKind,
    choice,
    null_or,
    number,
    whole,
)
from zengine.config.grammar.table import Row, ignored, renamed, section, setting

BATCH = null_or(whole(1), 0)
LEVELS = ("debug", "info", "warning", "error", "critical")


def _read_interval(value: object) -> int:
    """Return the steps between prints; integrations write infinity, or null, for never."""
    if value is None or value == math.inf:
        return 0
    interval: int = COUNT.read(value)
    return interval


INTERVAL = ValueKind("a whole number >= 0", _read_interval, {"anyOf": [COUNT.json_schema, {"type": "null"}]})


@attrs.frozen(kw_only=True)
class Optimizer:
    """optimizer: built by name."""

    type: str = setting(
        TEXT, "", "name of the optimizer; empty: passed to initialize()", empty="(none in the config)"
    )
    params: Mapping[str, Any] = setting(MAPPING, {}, "keyword arguments of the optimizer")


@attrs.frozen(kw_only=True)
class Scheduler:
    """scheduler: learning-rate schedule, built by name."""

    type: str = setting(
        TEXT, "", "name of the schedule; empty: none, or passed to initialize()", empty="(none in the config)"
    )
    params: Mapping[str, Any] = setting(MAPPING, {}, "keyword arguments of the schedule")


@attrs.frozen(kw_only=True, slots=False)
class RunKeys:
    """Keys of the top level that need no resolution: `Plan` has the same fields."""

    config_version: str = setting(
        TEXT,
        "",
        "release whose defaults apply to absent keys",
        empty="(present defaults)",
    )
    dump_state: bool = setting(TRUTH, False, "print the resolved plan at start")
    log_level: str = setting(
        null_or(choice(*LEVELS, fold=str.lower), ""),
        "",
        "level of the loggers; empty: unchanged",
        empty="(unchanged)",
    )


@attrs.frozen(kw_only=True, slots=False)
class TrainingKeys:
    """Keys of the top level about batches, gradients and their update."""

    train_batch_size: int = setting(
        BATCH, 0, "samples per optimizer step over all replicas", plan="batch.train_batch_size"
    )
    train_micro_batch_size_per_gpu: int = setting(
        BATCH, 0, "samples per forward on one rank", plan="batch.micro_batch_size"
    )
    gradient_accumulation_steps: int = setting(BATCH, 0, "micro-steps per optimizer step", plan="batch.accumulation")
    managed_gradient_accumulation: bool = setting(
        TRUTH,
        True,
        "count micro-steps to find the boundaries; false: every step() is one",
        plan="managed_accumulation",
    )
    dataloader_drop_last: bool = setting(
        TRUTH, False, "drop the last, partial batch of an epoch", plan="data.drop_last"
    )
    # Ours: with DeepSpeed the loop copies.
    dataloader_prefetch: int = setting(
        COUNT, 1, "batches copied to the device ahead of use; 0: batches stay on the host", plan="data.prefetch"
    )
    gradient_clipping: float = setting(
        number(0), 1.0, "maximum global L2 norm of the gradients; 0: off", plan="clip_norm", empty="off"
    )
    prescale_gradients: bool = setting(
        TRUTH,
        False,
        "divide gradients by the number of replicas before the reduction",
        plan="zero.averaging.prescale",
    )
    gradient_predivide_factor: float = setting(
        number(above=0),
        1.0,
        "divisor before the reduction; the rest of the division follows it",
        plan="zero.averaging.predivide",
    )
    sparse_gradients: bool = setting(TRUTH, False, "reduce only the used rows of nn.Embedding(sparse=True)")
    gradient_allreduce_op: str = setting(
        choice("mean", "sum", fold=str.lower),
        "mean",
        "reduction of gradients over replicas",
        plan="zero.averaging.operation",
    )
    communication_data_type: str = setting(
        null_or(DTYPE, ""),
        "",
        "dtype of gradients in collectives; default: that of the model",
        plan="precision.reduce",
        empty="(each parameter's)",
    )
    data_parallel_size: int = setting(BATCH, 0, "expected number of replicas; checked", plan="batch.replicas")
    sequence_parallel_size: int = setting(
        whole(1),
        1,
        "sequence-parallel degree: ranks that share the tokens of each sample",
        plan="parallel.degrees.sequence",
    )
    disable_python_gc: bool = setting(
        TRUTH, False, "disable Python's cyclic garbage collector while the engine is open"
    )
    optimizer: Optimizer = section(
        Optimizer, {"legacy_fusion": ignored(TRUTH, False, why="kernels are always fused")}
    )
    scheduler: Scheduler = section(Scheduler)


ALWAYS_OFFERED = "every torch optimizer is accepted"
OTHERS: dict[str, Row] = {
    "use_data_before_expert_parallelism": ignored(
        TRUTH, False, why="experts are distributed over consecutive ranks, with the same results"
    ),
    "fp32_allreduce": renamed(TRUTH, "communication_data_type", convert=lambda on: "fp32" if on else None),
    "vocabulary_size": ignored(null_or(COUNT, 0), why="it only asks for advice on padding"),
    "seq_parallel_communication_data_type": ignored(
        DTYPE, why="communication_data_type applies to gradients of sequence ranks as well"
    ),
    "disable_allgather": ignored(TRUTH, False, why="it is obsolete"),
    "allgather_size": ignored(COUNT, why="weights are gathered in the reduction buckets"),
    "reduce_scatter": ignored(TRUTH, True, why="sharded gradients are always reduce-scattered"),
    "memory_break_down": ignored(TRUTH, False, why='DeepSpeed reads "memory_breakdown"'),
    "cuda_visible_devices": ignored(ANYTHING, why="the launcher and its environment choose the devices"),
    "quantize_groups": ignored(COUNT, why='it belongs to "quantize_training"'),
    "comms_config": ignored(ANYTHING, why='DeepSpeed reads "comms_logger"'),
    "monitor_config": ignored(ANYTHING, why='DeepSpeed reads "tensorboard", "wandb", "comet" and "csv_monitor"'),
    "zero_allow_untested_optimizer": ignored(
        TRUTH,
        True,
        why=f"{ALWAYS_OFFERED}; if false, deepspeed.initialize() rejects those that DeepSpeed does not know",
    ),
    "zero_force_ds_cpu_optimizer": ignored(TRUTH, False, why=ALWAYS_OFFERED),
}
