"""Checks of a `PipelineModule` against a config, before ranks depend on each other.

The module was split into stages when it was made, without a config.  The keys of `pipeline` about the split are
compared with the module; the other keys choose the schedule and the layers that are recomputed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import attrs
from torch import nn

import zcomm
from zengine.config import ConfigError, Plan, Problem
from zengine.config.plan.fit_model import check_pipeline_keys
from zengine.imports import is_pipeline
from zpartition import ReduceAt

if TYPE_CHECKING:
    from zpartition.pipeline import PipelineModule, Schedule

__all__ = ["check_mesh", "check_pipeline", "fit_plan", "pipeline_axes"]

log = logging.getLogger("zengine")


def pipeline_axes(model: nn.Module) -> Mapping[str, int]:
    """Return the parallel degree that a pipeline fixes; empty for other models."""
    return {"pipeline": model.pipeline_position.num_ranks} if is_pipeline(model) else {}


def check_pipeline(model: nn.Module, plan: Plan) -> None:
    """Raise ConfigError for keys that do not fit the model, or pipelines; change and log nothing."""
    problems = list(_problems_of_stages(model, plan) if is_pipeline(model) else _problems_without_stages(model, plan))
    if problems:
        raise ConfigError("initialize()", problems)


def fit_plan(model: nn.Module, plan: Plan) -> Plan:
    """Return the plan for this model; a pipeline reduces its gradients once per batch.  No collective.

    Sets the layers that a pipeline recomputes, and warns of keys without effect and of idle ranks.

    Raises:
        ConfigError: as `check_pipeline`.
    """
    check_pipeline(model, plan)
    for notice in _warn_of_stages(model, plan) if is_pipeline(model) else _warn_unused_keys(plan):
        if zcomm.detect().rank == 0:
            log.warning("%s", notice)
    if not is_pipeline(model):
        return plan
    if plan.pipeline.activation_checkpoint_interval:
        model.recompute_interval = plan.pipeline.activation_checkpoint_interval
    return attrs.evolve(plan, zero=attrs.evolve(plan.zero, reduce_at=ReduceAt.BATCH))


def check_mesh(model: nn.Module, groups: zcomm.Groups) -> None:
    """Raise ValueError if a mesh places the ranks of a pipeline differently from its module."""
    if not is_pipeline(model):
        return
    own, theirs = model.groups().ranks("pipeline"), groups.ranks("pipeline")
    if own != theirs:
        raise ValueError(
            f"mesh= has rank {groups.rank} in the pipeline of ranks {list(theirs)}, and the PipelineModule was made "
            f"for {list(own)}: ranks of one stage are neighbours. Make pipeline the first axis of a mesh of all ranks"
        )


def _problems_without_stages(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    stages = plan.parallel.degrees.pipeline
    if stages > 1:
        yield Problem(
            key="pipeline.stages",
            given=stages,
            reason=f"the model is a {type(model).__name__}, which has all layers on every rank",
            suggestion=f"Pass zpartition.pipeline.PipelineModule(layers, num_stages={stages}), or leave the key out.",
        )


def _warn_unused_keys(plan: Plan) -> Iterator[str]:
    """Yield a warning for keys of the section, if the model has no stages."""
    section = {key: origin for key, origin in plan.origins.items() if key.startswith("pipeline.")}
    given = [key for key, origin in section.items() if origin != "default" and key != "pipeline.stages"]
    if given:
        yield f"{', '.join(given)}: no effect, since the model is not a PipelineModule"


def _warn_of_stages(model: PipelineModule, plan: Plan) -> Iterator[str]:
    """Yield a warning for another seeding than the module's, and for few micro-batches."""
    if plan.pipeline.seed_layers and not model.seed_layers:
        yield (
            "pipeline.seed_layers = true: no effect, since the PipelineModule was made with seed_layers=False; pass "
            "seed_layers=True there"
        )
    yield from _warn_few_micro_batches(model, plan)


def _problems_of_stages(model: PipelineModule, plan: Plan) -> Iterator[Problem]:
    asked, ranks = plan.pipeline, model.pipeline_position.num_ranks
    if plan.parallel.degrees.pipeline != ranks:
        yield _mismatch("pipeline.stages", plan.parallel.degrees.pipeline, f"num_stages={ranks}")
    if asked.partition and asked.partition.lower() != model.partition_method.lower():
        yield _mismatch("pipeline.partition", asked.partition, f"partition_method={model.partition_method!r}")
    yield from check_pipeline_keys(plan)
    if plan.data.packing and ranks > 1 and not model.dynamic_shape:
        yield Problem(
            key="data_efficiency.data_sampling.dynamic_batching.enabled",
            given=True,
            reason="micro-batches then have different numbers of samples, and stages send one shape",
            suggestion="Make the PipelineModule with dynamic_shape=True.",
        )
    if plan.hybrid_engine.enabled:
        yield Problem(
            key="hybrid_engine.enabled",
            given=True,
            reason="a PipelineModule has its layers on several ranks, and generation needs them on one",
            suggestion="Train the model without stages (ZeRO-3 shards its weights), or leave the section out.",
        )
    if model.is_compiled and asked.schedule == "zero_bubble":
        yield Problem(
            key="pipeline.schedule",
            given=asked.schedule,
            reason="the PipelineModule is compiled: a compiled layer has one backward, and this schedule splits it",
            suggestion='Use "1f1b", or leave PipelineModule.compile() out.',
        )
    if model.is_compiled and (plan.parallel.degrees.tensor > 1 or plan.parallel.degrees.expert > 1):
        yield Problem(
            reason="the PipelineModule is compiled, and its layers would be split over ranks, which then communicate "
            "inside a graph",
            suggestion="Call engine.compile() instead of PipelineModule.compile(): it leaves such layers out.",
        )
    yield from _problems_of_schedule(model, plan)


def _problems_of_schedule(model: PipelineModule, plan: Plan) -> Iterator[Problem]:
    """Yield a problem if the schedule does not support the number of micro-batches."""
    from zpartition.pipeline import ScheduleError

    ranks = model.pipeline_position.num_ranks
    try:
        _schedule(model, plan)
    except ScheduleError as error:
        yield Problem(
            key="pipeline.schedule",
            given=plan.pipeline.schedule,
            reason=f"{str(error).rstrip('.')} (gradient_accumulation_steps is {plan.batch.accumulation}, the "
            f"PipelineModule has {ranks} ranks of {model.num_stages // ranks} stages)",
            suggestion="Change gradient_accumulation_steps, the schedule, or stages_per_rank of the PipelineModule.",
        )


def _warn_few_micro_batches(model: PipelineModule, plan: Plan) -> Iterator[str]:
    """Yield a warning if there are fewer micro-batches than stages."""
    from zpartition.pipeline import simulate

    count, ranks = plan.batch.accumulation, model.pipeline_position.num_ranks
    if count < ranks:
        waiting = 1 - 1 / (1 + simulate(_schedule(model, plan)).bubble)
        yield (
            f"gradient_accumulation_steps = {count} micro-batches on {ranks} stages: ranks are idle for "
            f"{100 * waiting:.0f}% of the time; use {4 * ranks} or more micro-batches"
        )


def _schedule(model: PipelineModule, plan: Plan) -> Schedule:
    """Return the actions of a batch.  Raises ScheduleError."""
    from zpartition.pipeline import make_schedule

    ranks = model.pipeline_position.num_ranks
    per_rank = model.num_stages // ranks
    return make_schedule(plan.pipeline.schedule, ranks, plan.batch.accumulation, per_rank)


def _mismatch(key: str, given: object, own: str) -> Problem:
    return Problem(
        key=key,
        given=given,
        reason=f"the PipelineModule was made with {own}",
        suggestion=f"Make it with the value of {key}, or leave the key out.",
    )
