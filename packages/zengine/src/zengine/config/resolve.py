"""From a config and the facts of a machine to a plan: pure, and complete.

Derived values are worked out once, here, and say so in `Plan.origins`; no part of the engine derives again.
"""

from __future__ import annotations

from typing import Any

import torch

import zckpt
from zengine.config.activations import activation_notices
from zengine.config.batch import BatchTerms, Unsolvable, solve
from zengine.config.data import data_notices, data_plan
from zengine.config.errors import NOWHERE, ConfigError, Problem
from zengine.config.known import ROOT
from zengine.config.load import Config
from zengine.config.offload import devices, offload, offload_notices
from zengine.config.parallel import ParallelPlan, parallel_notices, parallel_plan
from zengine.config.pipeline import pipeline_plan
from zengine.config.plan import (
    BatchPlan,
    Facts,
    Plan,
    SchedulerPlan,
)
from zengine.config.precision import (
    derived_dtypes,
    numerics,
    optimizer_plan,
    precision,
    precision_notices,
    scaling,
    wire_dtypes,
)
from zengine.config.precision_rules import float8_has_a_device
from zengine.config.profiling import idle_profiling, profiler_ranks_exist, profiling
from zengine.config.rules import violations
from zengine.config.schema import Settings
from zengine.config.sequence import sequences_are_whole
from zengine.config.table import Care, walk
from zengine.config.telemetry import idle_rates, telemetry_plan
from zengine.config.zeropp import idle_keys, secondary_fits, wire_fields
from zpartition import Averaging, ReduceAt, SparseGradients, ZeroPolicy
from zprecision import Precision

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def resolve(config: Config, facts: Facts) -> Plan:
    """Answer every question that `config` leaves open.

    Raises ConfigError with all rules that are broken: the degrees of parallelism, the batch equation for the ranks
    that see different samples, and those between keys.
    """
    parallel = parallel_plan(config, facts)
    if isinstance(parallel, list):  # the other rules ask how many ranks do what
        raise ConfigError(config.source, violations(config) + parallel)
    batch = _batch(config, parallel)
    problems = violations(config) + ([batch] if isinstance(batch, Problem) else [])
    problems += _replicas_as_expected(config, parallel, facts)
    problems += _shard_groups_fit(config, parallel)
    problems += secondary_fits(config, parallel) + float8_has_a_device(config, facts)
    problems += profiler_ranks_exist(config, facts) + sequences_are_whole(config, parallel)
    if isinstance(batch, Problem) or problems:
        raise ConfigError(config.source, problems)
    settings = config.settings
    dtypes = precision(settings, facts)
    return Plan(
        batch=batch,
        parallel=parallel,
        activations=settings.activation_checkpointing,
        pipeline=pipeline_plan(settings),
        precision=dtypes,
        scaling=scaling(settings),
        cast_inputs=settings.fp16.enabled and settings.fp16.auto_cast,
        numerics=numerics(settings),
        zero=_zero(settings, dtypes, facts, parallel),
        optimizer=optimizer_plan(settings, dtypes),
        scheduler=SchedulerPlan(type=settings.scheduler.type, params=dict(settings.scheduler.params)),
        clip_norm=settings.gradient_clipping,
        skip_nonfinite=dtypes.param != torch.bfloat16 or settings.bf16.check_grad_overflow,
        telemetry=telemetry_plan(settings),
        profiling=profiling(settings),
        data=data_plan(config),
        async_save=settings.checkpoint.async_save,
        keep=_keep(settings),
        tag_validation=settings.checkpoint.tag_validation,
        dump_state=settings.dump_state,
        log_level=settings.log_level,
        managed_accumulation=settings.managed_gradient_accumulation,
        collect_garbage=not settings.disable_python_gc,
        config_version=settings.config_version,
        offloads=devices(settings),
        leaf_modules=_leaf_modules(settings),
        origins=_origins(config, dtypes),
        notices=(*config.notices, *_notices(config, facts, parallel), *precision_notices(config, dtypes)),
        given=config.document,
    )


def _leaf_modules(settings: Settings) -> dict[str, tuple[str, ...]]:
    leaves = settings.zero_optimization.leaf_module
    return {"classes": leaves.classes, "names": leaves.names, "name_suffixes": leaves.name_suffixes}


def _keep(settings: Settings) -> zckpt.Keep:
    keep = settings.checkpoint.keep
    if not keep.last:
        return zckpt.EVERYTHING
    return zckpt.Retention(last=keep.last, every=keep.every, best=keep.best, tags=keep.tags)


def _batch(config: Config, parallel: ParallelPlan) -> BatchPlan | Problem:
    settings = config.settings
    terms = BatchTerms(
        train=settings.train_batch_size,
        micro=settings.train_micro_batch_size_per_gpu,
        accumulation=settings.gradient_accumulation_steps,
    )
    try:
        return solve(terms, parallel.data_ranks)
    except Unsolvable as unsolvable:
        places = [config.given[key] for key in BATCH_KEYS if key in config.given]
        lines = [str(line) for line in sorted({place.line for place in places} - {0})]
        where = f" [line{'s' if len(lines) > 1 else ''} {', '.join(lines)}]" if lines else ""
        return Problem(
            place=places[0] if places else NOWHERE,
            reason=unsolvable.reason + where,
            suggestion=unsolvable.suggestion,
        )


def _replicas_as_expected(config: Config, parallel: ParallelPlan, facts: Facts) -> list[Problem]:
    expected, found = config.settings.data_parallel_size, parallel.data_ranks
    if expected in (0, found):
        return []
    return [
        Problem(
            place=config.given.get("data_parallel_size", NOWHERE),
            key="data_parallel_size",
            given=expected,
            reason=f"this run has {found} replicas (world size {facts.world_size})",
            suggestion=f"Start {expected} replicas, set it to {found}, or leave it out.",
        )
    ]


def _shard_groups_fit(config: Config, parallel: ParallelPlan) -> list[Problem]:
    size, key = config.settings.zero_optimization.shard_group_size, "zero_optimization.shard_group_size"
    ranks = parallel.gradient_ranks
    if not size or ranks % size == 0:
        return []
    divisors = [str(number) for number in range(1, ranks + 1) if ranks % number == 0]
    return [
        Problem(
            place=config.given.get(key, NOWHERE),
            key=key,
            given=size,
            reason=f"it does not divide the {ranks} ranks that share this model",
            suggestion=f"Choose one of {', '.join(divisors)}, or 0 for one group of all.",
        )
    ]


def _zero(settings: Settings, dtypes: Precision, facts: Facts, parallel: ParallelPlan) -> ZeroPolicy:
    zero = settings.zero_optimization
    wires: dict[str, Any] = {**wire_dtypes(settings), **wire_fields(zero, facts, parallel)}
    return ZeroPolicy(
        stage=zero.stage,
        bucket_numel=zero.reduce_bucket_size,
        accumulate_dtype=dtypes.accumulate,
        master_dtype=dtypes.master,
        averaging=Averaging(
            operation=settings.gradient_allreduce_op,
            prescale=settings.prescale_gradients,
            predivide=settings.gradient_predivide_factor,
        ),
        reduce_at=ReduceAt(zero.reduce_at),
        overlap=zero.overlap_comm,
        ignore_unused=zero.ignore_unused_parameters,
        sparse_gradients=SparseGradients.ROWS if settings.sparse_gradients else SparseGradients.DENSE,
        shard_group_size=_shard_group_size(settings, parallel),
        unit_numel=zero.stage3_unit_size,
        persist_numel=zero.stage3_param_persistence_threshold,
        persist_total_numel=zero.stage3_model_persistence_threshold,
        prefetch_numel=zero.stage3_prefetch_bucket_size,
        max_live_numel=zero.stage3_max_live_parameters,
        max_reuse_numel=zero.stage3_max_reuse_distance,
        offload=offload(settings, facts),
        leaves=(
            *zero.leaf_module.classes,
            *zero.leaf_module.names,
            *(f"*{end}" for end in zero.leaf_module.name_suffixes),
        ),
        **wires,
    )


def _shard_group_size(settings: Settings, parallel: ParallelPlan) -> int:
    """What the config says; a mesh with an axis of replicas says it too."""
    zero = settings.zero_optimization
    if zero.shard_group_size or not zero.stage or parallel.degrees.replicate == 1:
        return zero.shard_group_size
    return parallel.gradient_ranks // parallel.degrees.replicate


def _origins(config: Config, dtypes: Precision) -> dict[str, str]:
    """Where each value of the plan comes from, by the key that sets it."""
    settings = config.settings
    keys = [".".join(path) for path, entry in walk(ROOT) if entry.care is Care.HONOURED]
    keys = [key for key in keys if ".*." not in key]  # members that the user names are listed as they were given
    named = (".params.", ".curriculum_metrics.", ".layer_specs")
    keys += [key for key in config.given if any(name in key for name in named)]
    origins = {key: config.origin(key) for key in keys}
    written = [key for key in BATCH_KEYS if key in config.given]
    solved = next((key for key in BATCH_KEYS if key not in written), "")  # accumulation alone defaults to 1
    derived = {solved, "data_parallel_size", "communication_data_type", *derived_dtypes(settings, dtypes)}
    for key in derived - {"", *config.given, *config.autos}:
        origins[key] = "derived"
    if settings.bf16.enabled == "auto":
        origins["bf16.enabled"] = "auto"
    return origins


def _notices(config: Config, facts: Facts, parallel: ParallelPlan) -> list[str]:
    """What the person should hear about once, now that the machine is known."""
    settings = config.settings
    notices = [*offload_notices(config, facts), *idle_profiling(config, facts), *data_notices(config)]
    notices += [*idle_rates(config), *parallel_notices(config, parallel), *activation_notices(config, parallel)]
    prefixes = ("zero_optimization.stage3_", "zero_optimization.leaf_module.")
    unused = [key for key in config.given if key.startswith(prefixes)] + idle_keys(config)
    if unused and settings.zero_optimization.stage < 3:
        verb = "has" if len(unused) == 1 else "have"
        notices.append(f"{config.origin(unused[0])}: {', '.join(unused)} {verb} no effect here: the stage is not 3")
    if settings.bf16.enabled == "auto" and not facts.bf16_is_faster:
        also = ", and bf16.check_grad_overflow has no effect" * ("bf16.check_grad_overflow" in config.given)
        notices.append(
            f'{config.origin("bf16.enabled")}: bf16.enabled is "auto" and bf16 is not faster on this '
            f"{facts.device_type}: training in float32{also}"
        )
    return notices
