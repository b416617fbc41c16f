"""Resolution of a config: config and facts -> plan.  Pure.

Values are derived only here, and `Plan.origins` marks them; no part of the engine derives values again.
"""

from __future__ import annotations

import torch

import zckpt
from zengine.config.grammar.errors import NOWHERE, ConfigError, Problem
from zengine.config.grammar.table import Support, walk
from zengine.config.keys.root import ROOT, Settings
from zengine.config.plan.batch import BatchPlan, BatchTerms, Unsolvable, solve
from zengine.config.plan.data import data_notices, data_plan
from zengine.config.plan.data_rules import check_whole_sequences
from zengine.config.plan.elastic import BATCH_KEYS, elastic_batch, elastic_notices
from zengine.config.plan.facts import Facts
from zengine.config.plan.moq import moq_plan
from zengine.config.plan.optimizer import SchedulerPlan, optimizer_notices, optimizer_plan
from zengine.config.plan.parallel import ParallelPlan, activation_notices, parallel_notices, parallel_plan
from zengine.config.plan.plan import Plan
from zengine.config.plan.precision import derived_dtypes, numerics, precision, precision_notices, scaling
from zengine.config.plan.precision_rules import check_fp8_device
from zengine.config.plan.replica_groups import diloco_notices
from zengine.config.plan.rows import planned
from zengine.config.plan.rules import violations
from zengine.config.plan.technique_rules import technique_notices, technique_problems
from zengine.config.plan.telemetry import (
    check_profiler_ranks,
    profiling,
    profiling_notices,
    rate_notices,
    telemetry_plan,
)
from zengine.config.plan.zero import (
    averaging_notices,
    check_secondary_group_size,
    check_shard_group_size,
    feedback_notices,
    leaf_modules,
    offload_devices,
    offload_notices,
    stage_3_keys,
    zero_policy,
)
from zengine.config.reading.load import Config
from zprecision import Precision


def resolve(config: Config, facts: Facts) -> Plan:
    """Resolve every value of `config` for the world that `facts` describes.

    Raises ConfigError with every violated rule: the degrees of parallelism, the batch equation for the data-parallel
    ranks, and the rules between keys.

    >>> from zengine.config import Facts, load, resolve
    >>> config = load({"train_batch_size": 64, "gradient_accumulation_steps": 2})
    >>> resolve(config, Facts(world_size=8, replicas=8)).batch.micro_batch_size
    4
    """
    parallel = parallel_plan(config, facts)
    if isinstance(parallel, list):  # the remaining rules need the degrees
        raise ConfigError(config.source, violations(config) + parallel)
    batch = _batch(config, parallel)
    problems = violations(config) + ([batch] if isinstance(batch, Problem) else [])
    problems += _check_data_parallel_size(config, parallel, facts)
    problems += check_shard_group_size(config, parallel)
    problems += check_secondary_group_size(config, parallel) + check_fp8_device(config, facts)
    problems += check_profiler_ranks(config, facts) + check_whole_sequences(config, parallel)
    problems += technique_problems(config, parallel)
    if isinstance(batch, Problem) or problems:
        raise ConfigError(config.source, problems)
    settings = config.settings
    dtypes = precision(settings, facts)
    derived = {
        "batch": batch,
        "parallel": parallel,
        "precision": dtypes,
        "scaling": scaling(settings),
        "cast_inputs": settings.fp16.enabled and settings.fp16.auto_cast,
        "numerics": numerics(settings),
        "zero": zero_policy(settings, dtypes, facts, parallel, batch.accumulation),
        "zenflow": settings.zero_optimization.zenflow,
        "optimizer": optimizer_plan(settings, dtypes),
        "scheduler": SchedulerPlan(type=settings.scheduler.type, params=dict(settings.scheduler.params)),
        "skip_nonfinite": dtypes.param != torch.bfloat16 or settings.bf16.check_grad_overflow,
        "telemetry": telemetry_plan(settings),
        "profiling": profiling(settings),
        "data": data_plan(config),
        "moq": moq_plan(settings),
        "keep": _keep(settings),
        "loads_full_masters": settings.zero_optimization.load_from_fp32_weights,
        "collect_garbage": not settings.disable_python_gc,
        "offloads": offload_devices(settings),
        "leaf_modules": leaf_modules(settings),
        "origins": _origins(config, dtypes),
        "notices": (*config.notices, *_notices(config, facts, parallel, dtypes)),
        "given": config.document,
    }
    return Plan(**planned(settings, Plan, activations=settings.activation_checkpointing, **derived))


def _keep(settings: Settings) -> zckpt.RetentionPolicy:
    keep = settings.checkpoint.keep
    if not keep.last:
        return zckpt.KEEP_ALL
    return zckpt.Retention(last=keep.last, every=keep.every, best=keep.best, tags=keep.tags)


def _batch(config: Config, parallel: ParallelPlan) -> BatchPlan | Problem:
    settings = config.settings
    if settings.elasticity.enabled:
        return elastic_batch(config, parallel)
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


def _check_data_parallel_size(config: Config, parallel: ParallelPlan, facts: Facts) -> list[Problem]:
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


def _origins(config: Config, dtypes: Precision) -> dict[str, str]:
    """Return the origin of each value of the plan, by the key that sets it."""
    settings = config.settings
    keys = [".".join(path) for path, entry in walk(ROOT) if entry.support is Support.HONOURED]
    keys = [key for key in keys if ".*." not in key]  # members with the user's names are added from `given`
    named = (".params.", ".curriculum_metrics.", ".layer_specs", ".different_groups.")
    keys += [key for key in config.given if any(name in key for name in named)]
    origins = {key: config.origin(key) for key in keys}
    written = [key for key in BATCH_KEYS if key in config.given]
    solved = next((key for key in BATCH_KEYS if key not in written), "")  # accumulation alone defaults to 1
    derived = {solved, "data_parallel_size", "communication_data_type", *derived_dtypes(settings, dtypes)}
    derived |= {"zero_optimization.reduce_at"}
    for key in derived - {"", *config.given, *config.autos}:
        origins[key] = "derived"
    if settings.bf16.enabled == "auto":
        origins["bf16.enabled"] = "auto"
    return origins


def _notices(config: Config, facts: Facts, parallel: ParallelPlan, dtypes: Precision) -> list[str]:
    """Return the notices that depend on the facts or on several keys."""
    settings = config.settings
    notices = [*offload_notices(config, facts), *averaging_notices(config), *profiling_notices(config, facts)]
    notices += technique_notices(config)
    notices += [*data_notices(config), *elastic_notices(config, parallel)]
    notices += feedback_notices(config) + diloco_notices(config, parallel.degrees.replicate)
    notices += [*rate_notices(config), *parallel_notices(config, parallel), *activation_notices(config, parallel)]
    prefixes = ("zero_optimization.stage3_", "zero_optimization.leaf_module.")
    unused = [key for key in config.given if key.startswith(prefixes)] + stage_3_keys(config)
    if unused and settings.zero_optimization.stage < 3:
        verb = "has" if len(unused) == 1 else "have"
        notices.append(f"{config.origin(unused[0])}: {', '.join(unused)} {verb} no effect here: the stage is not 3")
    if settings.bf16.enabled == "auto" and not facts.bf16_is_faster:
        also = ", and bf16.check_grad_overflow has no effect" * ("bf16.check_grad_overflow" in config.given)
        notices.append(
            f'{config.origin("bf16.enabled")}: bf16.enabled is "auto" and bf16 is not faster on this '
            f"{facts.device_type}: training in float32{also}"
        )
    return [*notices, *precision_notices(config, dtypes), *optimizer_notices(config, dtypes)]
