"""A plan as a table that a person can check: key, value, where the value comes from."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

import zckpt
from zengine.config.activations import activation_rows
from zengine.config.errors import shown
from zengine.config.numerics import precision_rows
from zengine.config.parallel import parallel_rows
from zengine.config.pipeline import pipeline_rows
from zengine.config.profiling import profiling_rows
from zengine.config.telemetry import telemetry_rows
from zpartition import Speculation

if TYPE_CHECKING:
    from zengine.config.plan import Plan

Row = tuple[str, Any]  # the key of the config, the value of the plan


def rows(plan: Plan) -> Iterator[Row]:
    """Every value of the plan under the key that sets it, in the order of a config."""
    yield "config_version", plan.config_version or "(present defaults)"
    yield "train_batch_size", plan.batch.train_batch_size
    yield "train_micro_batch_size_per_gpu", plan.batch.micro_batch_size
    yield "gradient_accumulation_steps", plan.batch.accumulation
    yield "managed_gradient_accumulation", plan.managed_accumulation
    yield "data_parallel_size", plan.batch.replicas
    yield from parallel_rows(plan.parallel)
    yield from pipeline_rows(plan.pipeline)
    yield from plan.data.rows
    for section, choice in (("optimizer", plan.optimizer), ("scheduler", plan.scheduler)):
        yield f"{section}.type", choice.type or "(none in the config)"
        yield from ((f"{section}.params.{name}", value) for name, value in choice.params.items())
    yield "gradient_clipping", plan.clip_norm or "off"
    yield from precision_rows(plan)
    yield from _reduction_rows(plan)
    yield from telemetry_rows(plan.telemetry)
    yield from profiling_rows(plan.profiling)
    yield from activation_rows(plan.activations)
    yield "checkpoint.async_save", plan.async_save
    yield from _keep_rows(plan)
    yield "checkpoint.tag_validation", plan.tag_validation
    yield "dump_state", plan.dump_state
    yield "disable_python_gc", not plan.collect_garbage
    yield "log_level", plan.log_level or "(unchanged)"


def _keep_rows(plan: Plan) -> Iterator[Row]:
    keep = plan.keep if isinstance(plan.keep, zckpt.Retention) else zckpt.Retention()
    yield "checkpoint.keep.last", keep.last if keep is plan.keep else "all"
    yield "checkpoint.keep.every", keep.every or "off"
    yield (
        "checkpoint.keep.best",
        ", ".join(f"{each.mode} {each.metric} ({each.count})" for each in keep.best) or "off",
    )
    yield "checkpoint.keep.tags", ", ".join(keep.tags) or "off"


def _reduction_rows(plan: Plan) -> Iterator[Row]:
    zero = plan.zero
    yield "zero_optimization.stage", zero.stage
    yield "zero_optimization.reduce_bucket_size", zero.bucket_numel or "(from the model's size)"
    yield "zero_optimization.overlap_comm", zero.overlap
    yield "zero_optimization.reduce_at", zero.reduce_at.value
    yield "zero_optimization.ignore_unused_parameters", zero.ignore_unused
    yield "zero_optimization.stage3_prefetch_bucket_size", zero.prefetch_numel
    yield "zero_optimization.stage3_param_persistence_threshold", zero.persist_numel
    yield "zero_optimization.stage3_model_persistence_threshold", _unlimited(zero.persist_total_numel)
    yield "zero_optimization.stage3_max_live_parameters", zero.max_live_numel
    yield "zero_optimization.stage3_max_reuse_distance", zero.max_reuse_numel
    yield "zero_optimization.stage3_unit_size", zero.unit_numel or "(from the model's size)"
    yield "zero_optimization.shard_group_size", zero.shard_group_size or "(all ranks)"
    yield "zero_optimization.zero_hpz_partition_size", zero.secondary_group_size or 1
    yield "zero_optimization.zero_quantized_weights", bool(zero.weight_bits)
    yield "zero_optimization.zero_quantized_nontrainable_weights", bool(zero.frozen_weight_bits)
    yield "zero_optimization.zero_quantized_gradients", bool(zero.gradient_bits)
    for kind in ("classes", "names", "name_suffixes"):
        yield f"zero_optimization.leaf_module.{kind}", ", ".join(plan.leaf_modules.get(kind, ())) or "(none)"
    yield from _offload_rows(plan)
    yield "communication_data_type", plan.precision.reduce or "(each parameter's)"
    yield "gradient_allreduce_op", zero.averaging.operation
    yield "prescale_gradients", zero.averaging.prescale
    yield "sparse_gradients", zero.sparse_gradients.value == "rows"
    yield "gradient_predivide_factor", zero.averaging.predivide


def _offload_rows(plan: Plan) -> Iterator[Row]:
    offload, section = plan.zero.offload, "zero_optimization.offload_optimizer"
    for name in ("offload_optimizer", "offload_param"):
        yield f"zero_optimization.{name}.device", plan.offloads.get(name, "none")
    for name in ("offload_optimizer", "offload_param"):
        yield f"zero_optimization.{name}.nvme_path", offload.directory or "(none)"
    for name in ("offload_optimizer", "offload_param"):
        yield f"zero_optimization.{name}.pin_memory", offload.pin
    yield f"{section}.ratio", offload.ratio
    yield f"{section}.buffer_count", offload.buffer_count
    yield f"{section}.super_offload", offload.speculation is not Speculation.OFF
    yield "zero_optimization.sub_group_size", offload.step_numel or "(a bucket)"
    yield "aio.intra_op_parallelism", offload.num_threads


def _unlimited(numel: int) -> object:
    return "(unlimited)" if numel == sys.maxsize else numel


def value_of(plan: Plan, key: str) -> Any:
    """The value that `key` sets; a KeyError names the nearest keys."""
    found = dict(rows(plan))
    if key in found:
        return found[key]
    near = difflib.get_close_matches(key, found, n=3) or [name for name in found if name.startswith(key + ".")]
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    raise KeyError(f"the plan has no value for {key!r}{hint}")


def looked_up(plan: Plan, key: str, default: Any = None) -> Any:
    """The value that `key` sets; for the name of a section the dict of its values; `default` for anything else."""
    found = dict(rows(plan))
    if key in found:
        return found[key]
    section: dict[str, Any] = {}
    for name, value in found.items():
        if name.startswith(f"{key}."):
            *folders, last = name.removeprefix(f"{key}.").split(".")
            inner = section
            for folder in folders:
                inner = inner.setdefault(folder, {})
            inner[last] = value
    return section or default


def table(plan: Plan) -> str:
    """The rows in columns, then the notices, one a line."""
    lines = [(key, text_of(value), plan.origins.get(key, "default")) for key, value in rows(plan)]
    key_width = max(len(key) for key, _, _ in lines)
    value_width = max(len(value) for _, value, _ in lines)
    text = [f"{key:<{key_width}}  {value:<{value_width}}  {origin}" for key, value, origin in lines]
    return "\n".join([*text, *(f"note: {notice}" for notice in plan.notices)])


def text_of(value: Any) -> str:
    """A value of the plan as a person would write it."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if isinstance(value, str) else shown(value)
