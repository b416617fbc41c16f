"""A `PipelineModule` meets a config: what does not fit is told before ranks depend on each other.

The module was cut when it was made, without a config; the keys of `pipeline` that say how are compared with what it
is.  What they still decide is the schedule and which layers are computed again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeGuard

import attrs
from torch import nn

import zcomm
from zengine.config import ConfigError, Plan, Problem
from zengine.config.pipeline import unfit_for_pipelines
from zengine.lazily import is_imported
from zpartition import ReduceAt

if TYPE_CHECKING:
    from zpartition.pipeline import PipelineModule

__all__ = ["fitted", "is_staged", "refuse_elsewhere", "stage_axes"]

log = logging.getLogger("zengine")


def is_staged(model: nn.Module) -> TypeGuard[PipelineModule]:
    """Whether `model` is some of the layers of a pipeline."""
    if not is_imported("zpartition.pipeline"):
        return False
    from zpartition.pipeline import PipelineModule

    return isinstance(model, PipelineModule)


def stage_axes(model: nn.Module) -> Mapping[str, int]:
    """The degree that a pipeline lays out by itself; nothing for other models."""
    return {"pipeline": model.place.num_ranks} if is_staged(model) else {}


def fitted(model: nn.Module, plan: Plan) -> Plan:
    """The plan as it is for this model; a pipeline reduces its gradients once a batch.  No collective.

    Raises:
        ConfigError: keys that do not go with the model, or with pipelines.
    """
    problems = list(_staged(model, plan) if is_staged(model) else _whole(model, plan))
    if problems:
        raise ConfigError("initialize()", problems)
    if not is_staged(model):
        return plan
    if plan.pipeline.recompute_interval:
        model.recompute_interval = plan.pipeline.recompute_interval
    return attrs.evolve(plan, zero=attrs.evolve(plan.zero, reduce_at=ReduceAt.BATCH))


def refuse_elsewhere(model: nn.Module, groups: zcomm.Groups) -> None:
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
    section = {key: origin for key, origin in plan.origins.items() if key.startswith("pipeline.")}
    given = [key for key, origin in section.items() if origin != "default" and key != "pipeline.stages"]
    if given and stages == 1 and zcomm.detect().rank == 0:
        log.warning("%s: no effect, since the model is no PipelineModule", ", ".join(given))


def _staged(model: PipelineModule, plan: Plan) -> Iterator[Problem]:
    asked, ranks = plan.pipeline, model.place.num_ranks
    if plan.parallel.degrees.pipeline != ranks:
        yield _unlike("pipeline.stages", plan.parallel.degrees.pipeline, f"num_stages={ranks}")
    if asked.partition and asked.partition.lower() != model.partition_method.lower():
        yield _unlike("pipeline.partition", asked.partition, f"partition_method={model.partition_method!r}")
    if asked.seeds_layers and not model.seed_layers:
        yield _unlike("pipeline.seed_layers", True, "seed_layers=False")
    yield from unfit_for_pipelines(plan)
    yield from _schedule(model, plan)


def _schedule(model: PipelineModule, plan: Plan) -> Iterator[Problem]:
    """Whether the schedule takes so many micro-batches, and what it costs if they are few."""
    from zpartition.pipeline import ScheduleError, make_schedule, predict

    count, ranks = plan.batch.accumulation, model.place.num_ranks
    per_rank = model.num_stages // ranks
    name = "interleaved" if plan.pipeline.schedule == "1f1b" and per_rank > 1 else plan.pipeline.schedule
    try:
        schedule = make_schedule(name, ranks, count, per_rank)
    except ScheduleError as error:
        yield Problem(
            key="pipeline.schedule",
            given=plan.pipeline.schedule,
            reason=f"{str(error).rstrip('.')} (gradient_accumulation_steps is {count}, the PipelineModule has "
            f"{ranks} ranks of {per_rank} stages)",
            suggestion="Change gradient_accumulation_steps, the schedule, or stages_per_rank of the PipelineModule.",
        )
        return
    if count < ranks and zcomm.detect().rank == 0:
        log.warning(
            "gradient_accumulation_steps = %d micro-batches on %d stages: ranks wait for %.0f%% of the time; %d or "
            "more keep all of them busy",
            count,
            ranks,
            100 * (1 - 1 / (1 + predict(schedule).bubble)),
            4 * ranks,
        )


def _unlike(key: str, given: object, own: str) -> Problem:
    return Problem(
        key=key,
        given=given,
        reason=f"the PipelineModule was made with {own}",
        suggestion=f"Make it with what {key} says, or leave the key out.",
    )
