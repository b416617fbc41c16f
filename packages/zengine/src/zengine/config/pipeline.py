"""What a plan says about pipelines, as a value, and what of a config does not go with one.

How many stages there are is a degree of parallelism (parallel.py).  A `PipelineModule` is cut before there is a
config, so the keys that say how are compared with what it is (`zengine.staging`); what is left to decide is the
schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs

from zengine.config.errors import Problem

if TYPE_CHECKING:
    from zengine.config.plan import Plan
    from zengine.config.schema import Settings

__all__ = ["PipelinePlan", "pipeline_plan", "pipeline_rows", "unfit_for_pipelines"]


@attrs.frozen(kw_only=True)
class PipelinePlan:
    """How a PipelineModule is carried out, and what it has to be."""

    schedule: str = "1f1b"
    stages: int = 0  # ranks along it; 0: as it is
    partition: str = ""  # its partition_method; "": any
    seeds_layers: bool = False  # its layers have seeds of their own, checked where True
    recompute_interval: int = 0  # layers recomputed together; 0: as it says


def pipeline_plan(settings: Settings) -> PipelinePlan:
    """The section as a plan."""
    given = settings.pipeline
    return PipelinePlan(
        schedule=given.schedule,
        stages=given.stages,
        partition=given.partition,
        seeds_layers=given.seed_layers,
        recompute_interval=given.activation_checkpoint_interval,
    )


def pipeline_rows(plan: PipelinePlan) -> Iterator[tuple[str, Any]]:
    """Key and value for people."""
    own = "(the PipelineModule's)"
    yield "pipeline.stages", plan.stages or own
    yield "pipeline.partition", plan.partition or own
    yield "pipeline.seed_layers", plan.seeds_layers
    yield "pipeline.activation_checkpoint_interval", plan.recompute_interval or own
    yield "pipeline.schedule", plan.schedule


def unfit_for_pipelines(plan: Plan) -> list[Problem]:
    """What looks at the layers of one rank; in a pipeline there are several."""
    if not plan.telemetry.rates.count_flops_at:
        return []
    key = "timers.throughput.count_flops_at"
    return [
        Problem(
            key=key,
            given=plan[key],
            reason="the operations of one rank are counted, and the model is a PipelineModule, whose ranks hold some "
            "of the layers",
            suggestion='Leave it out; "flops_profiler" counts a batch on every stage.',
        )
    ]
