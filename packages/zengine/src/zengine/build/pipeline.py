"""A `PipelineModule` meets a config: what does not fit is told before ranks depend on each other.

The module was cut when it was made, without a config; the keys of `pipeline` that say how are compared with what it
is.  What they still decide is the schedule and which layers are computed again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
from torch import nn

import zcomm
from zengine.config import ConfigError, Plan, Problem
from zengine.config.plan.fit_model import check_pipeline_keys
from zengine.engine.stages import is_staged
from zpartition import ReduceAt

if TYPE_CHECKING:
    from zpartition.pipeline import PipelineModule, Schedule

__all__ = ["check_mesh", "check_pipeline", "fitted"]

log = logging.getLogger("zengine")


def check_pipeline(model: nn.Module, plan: Plan) -> None:
    """ConfigError for keys that do not go with the model, or with pipelines; nothing is changed or told."""
    problems = list(_staged(model, plan) if is_staged(model) else _whole(model, plan))
    if problems:
        raise ConfigError("initialize()", problems)


def fitted(model: nn.Module, plan: Plan) -> Plan:
    """The plan as it is for this model; a pipeline reduces its gradients once a batch.  No collective.

    Sets the layers that a pipeline recomputes together, and warns of keys without effect and of ranks that wait.
    Raises ConfigError as `check_pipeline` does.
    """
    check_pipeline(model, plan)
    for notice in _few_micro_batches(model, plan) if is_staged(model) else _idle_keys(plan):
        if zcomm.detect().rank == 0:
            log.warning("%s", notice)
    if not is_staged(model):
        return plan
    if plan.pipeline.activation_checkpoint_interval:
        model.recompute_interval = plan.pipeline.activation_checkpoint_interval
    return attrs.evolve(plan, zero=attrs.evolve(plan.zero, reduce_at=ReduceAt.BATCH))


def check_mesh(model: nn.Module, groups: zcomm.Groups) -> None:
    """ValueError if a mesh puts the ranks of a pipeline in other places than its module was cut for."""
    if not is_staged(model):
        return
    own, theirs = model.groups().ranks("pipeline"), groups.ranks("pipeline")
    if own != theirs:
        raise ValueError(
            f"mesh= has rank {groups.rank} in the pipeline of ranks {list(theirs)}, and the PipelineModule was cut "
            f"for {list(own)}: ranks of one stage are neighbours. Make pipeline the first axis of a mesh of all ranks"
        )


def _whole(model: nn.Module, plan: Plan) -> Iterator[Problem]:
    stages = plan.parallel.degrees.pipeline
    if stages > 1:
        yield Problem(
            key="pipeline.stages",
            given=stages,
            reason=f"the model is a {type(model).__name__}, of which every rank has all layers",
            suggestion=f"Give a zpartition.pipeline.PipelineModule(layers, num_stages={stages}), or leave it out.",
        )


def _idle_keys(plan: Plan) -> Iterator[str]:
    """Return what is said of stages to a model that has none."""
    section = {key: origin for key, origin in plan.origins.items() if key.startswith("pipeline.")}
    given = [key for key, origin in section.items() if origin != "default" and key != "pipeline.stages"]
    if given:
        yield f"{', '.join(given)}: no effect, since the model is no PipelineModule"


def _staged(model: PipelineModule, plan: Plan) -> Iterator[Problem]:
    asked, ranks = plan.pipeline, model.pipeline_position.num_ranks
    if plan.parallel.degrees.pipeline != ranks:
        yield _unlike("pipeline.stages", plan.parallel.degrees.pipeline, f"num_stages={ranks}")
    if asked.partition and asked.partition.lower() != model.partition_method.lower():
        yield _unlike("pipeline.partition", asked.partition, f"partition_method={model.partition_method!r}")
    if asked.seed_layers and not model.seed_layers:
        yield _unlike("pipeline.seed_layers", True, "seed_layers=False")
    yield from check_pipeline_keys(plan)
    if plan.data.packing and ranks > 1 and not model.dynamic_shape:
        yield Problem(
            key="data_efficiency.data_sampling.dynamic_batching.enabled",
            given=True,
            reason="micro-batches then have different numbers of samples, and stages hand on one shape",
            suggestion="Make the PipelineModule with dynamic_shape=True.",
        )
    yield from _unscheduled(model, plan)


def _unscheduled(model: PipelineModule, plan: Plan) -> Iterator[Problem]:
    """Return whether the schedule takes so many micro-batches."""
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


def _few_micro_batches(model: PipelineModule, plan: Plan) -> Iterator[str]:
    """Return what it costs if they are fewer than the stages."""
    from zpartition.pipeline import simulate

    count, ranks = plan.batch.accumulation, model.pipeline_position.num_ranks
    if count < ranks:
        waiting = 1 - 1 / (1 + simulate(_schedule(model, plan)).bubble)
        yield (
            f"gradient_accumulation_steps = {count} micro-batches on {ranks} stages: ranks wait for "
            f"{100 * waiting:.0f}% of the time; {4 * ranks} or more keep all of them busy"
        )


def _schedule(model: PipelineModule, plan: Plan) -> Schedule:
    """The actions of a batch.  Raises ScheduleError."""
    from zpartition.pipeline import make_schedule

    ranks = model.pipeline_position.num_ranks
    per_rank = model.num_stages // ranks
    name = "interleaved" if plan.pipeline.schedule == "1f1b" and per_rank > 1 else plan.pipeline.schedule
    return make_schedule(name, ranks, plan.batch.accumulation, per_rank)


def _unlike(key: str, given: object, own: str) -> Problem:
    return Problem(
        key=key,
        given=given,
        reason=f"the PipelineModule was made with {own}",
        suggestion=f"Make it with what {key} says, or leave the key out.",
    )
