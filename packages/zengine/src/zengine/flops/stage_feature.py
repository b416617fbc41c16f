"""`flops_profiler` in a pipeline: profile one batch on every stage; rank 0 prints the model's table.

The ranks of rank 0's pipeline count the first batch that begins after `profile_step` steps, over all micro-batches:
forwards by module, and the backward as a whole.  Results are per micro-batch.  At the end of the batch rank 0 gathers
the profiles and prints the model's table with a line per stage.

Names are those of the whole model, so the rows of the stages are concatenated; costs of modules that span stages (the
model, containers that are never called) are added.  The time is that of one micro-batch through all stages in
sequence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import attrs
import torch

import zcomm
import zpartition
from zengine.engine.feature import Feature
from zengine.flops.feature import FILE
from zengine.flops.meter import make_counter
from zengine.flops.profile import FlopsProfile, ModuleCost, format_amount, format_profile
from zengine.flops.profiler import FlopsProfiler, publish
from zengine.telemetry.sinks import log_os_errors
from zpartition.pipeline import Passes

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from zengine.config.plan.telemetry import FlopsPlan
    from zengine.engine.parts import Run
    from zengine.step_report import StepReport
    from zpartition.pipeline import PipelineModule, PipelineRunner

__all__ = ["CountedPasses", "StageFlops", "join_stages", "per_micro_batch", "stage_lines"]


@final
@attrs.define(eq=False)
class CountedPasses(Passes):
    """Wraps the passes of an engine and counts them while they train."""

    inner: Passes
    profiler: FlopsProfiler
    backward_flops: int = 0  # of the batch so far

    def forward(self, module: PipelineModule, stage: int, value: Any, around: Any) -> Any:
        """Count by module, except in an evaluation."""
        if not torch.is_grad_enabled():
            return self.inner.forward(module, stage, value, around)
        self.profiler.resume_profile()
        try:
            return self.inner.forward(module, stage, value, around)
        finally:
            self.profiler.stop_profile()

    def loss(self, loss_fn: Callable[[Any, Any], Any], output: Any, labels: Any) -> Any:
        """Compute the loss, uncounted: it belongs to no module."""
        return self.inner.loss(loss_fn, output, labels)

    def share(self, loss: Tensor, micro_batches: int) -> Tensor:
        """Delegate."""
        return self.inner.share(loss, micro_batches)

    @contextmanager
    def backward(self, *, is_last: bool) -> Iterator[None]:
        """Count the backward as a whole."""
        counter = make_counter()
        with self.inner.backward(is_last=is_last), counter:
            yield
        self.backward_flops += int(counter.get_total_flops())

    def whole(self, params: Iterable[Parameter]) -> AbstractContextManager[Any]:
        """Delegate."""
        return self.inner.whole(params)


@final
class StageFlops(Feature):
    """Measures one batch.  Invariant: `counted` holds the passes exactly while a batch is due."""

    def __init__(self, plan: FlopsPlan, folder: Path | None, pipeline: PipelineRunner) -> None:
        """Wait for the batch.  folder: folder of the run, for flops.json; None: not written.

        pipeline: runner whose passes are counted.
        """
        self._plan = plan
        self._folder = folder
        self._pipeline = pipeline
        self._counted: list[CountedPasses] = []
        self._waits = True  # the batch to count is still to come

    def attach(self, run: Run) -> None:
        self._run = run
        groups = run.parts.groups
        self._waits = int(groups.table.min()) in groups.ranks("pipeline")
        self._begin_if_due()

    def step_end(self, report: StepReport) -> None:
        while self._counted:
            passes = self._counted.pop()
            self._pipeline.passes = passes.inner
            self._publish(
                per_micro_batch(passes.profiler.profile(passes.backward_flops), self._run.clock.accumulation)
            )
        self._begin_if_due()

    def _begin_if_due(self) -> None:
        run = self._run
        if self._waits and run.clock.steps >= self._plan.profile_step:
            self._waits = False
            profiler = FlopsProfiler(run.module, run, self._plan.recompute_fwd_factor)
            passes = CountedPasses(self._pipeline.passes, profiler)
            self._pipeline.passes = passes
            self._counted.append(passes)

    def _publish(self, own: FlopsProfile) -> None:
        """Join the profiles and publish them on the first rank.  A collective of the pipeline."""
        run, plan, group = self._run, self._plan, zpartition.pipeline_stages_of(self._run.module)
        rows = [own.as_json()] if group.size == 1 else zcomm.all_gather_object(own.as_json(), group.group)
        if group.rank:
            return
        stages = [FlopsProfile.from_json(each) for each in rows]
        profile, step = join_stages(stages), run.clock.steps - 1
        text = format_profile(
            profile, step=step, module_depth=plan.module_depth, top_modules=plan.top_modules, detailed=plan.detailed
        )
        with log_os_errors(f"the table of FLOPs in {plan.output_file or 'the standard output'}"):
            publish(f"{text}\n\n{stage_lines(stages)}", plan.output_file)
        if self._folder is not None:
            self._write(self._folder, profile, stages, step)

    def _write(self, folder: Path, profile: FlopsProfile, stages: list[FlopsProfile], step: int) -> None:
        keys = ("params", "flops", "ms")
        rows = [
            {"backward_flops": each.backward_flops, **{key: getattr(each.total, key) for key in keys}}
            for each in stages
        ]
        facts = {"step": step, "micro_batch_size": self._run.micro_batch_size, "stages": rows}
        with log_os_errors(f"{FILE} in {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / FILE).write_text(json.dumps({**facts, **profile.as_json()}) + "\n", encoding="utf-8")


# -- join of the stages' profiles ----------------------------------------------------------------


def per_micro_batch(profile: FlopsProfile, count: int) -> FlopsProfile:
    """Return the profile of one of `count` micro-batches that were counted together."""

    def part(cost: ModuleCost) -> ModuleCost:
        return attrs.evolve(cost, flops=cost.flops // count, ms=cost.ms / count, calls=cost.calls // count)

    return attrs.evolve(
        profile,
        modules=tuple(map(part, profile.modules)),
        operations={name: flops // count for name, flops in profile.operations.items()},
        backward_flops=profile.backward_flops // count,
    )


def join_stages(profiles: Sequence[FlopsProfile]) -> FlopsProfile:
    """Return the profile of the model from those of its stages."""
    costs: dict[str, ModuleCost] = {}
    operations: dict[str, int] = {}
    for profile in profiles:
        for cost in profile.modules:
            costs[cost.path] = _add(costs[cost.path], cost) if cost.path in costs else cost
        for name, flops in profile.operations.items():
            operations[name] = operations.get(name, 0) + flops
    return FlopsProfile(
        modules=tuple(costs.values()),
        operations=operations,
        backward_flops=sum(profile.backward_flops for profile in profiles),
        recompute_factor=profiles[0].recompute_factor,
    )


def _add(one: ModuleCost, other: ModuleCost) -> ModuleCost:
    return attrs.evolve(
        one,
        params=one.params + other.params,
        flops=one.flops + other.flops,
        ms=one.ms + other.ms,
        calls=max(one.calls, other.calls),
    )


def stage_lines(profiles: Sequence[FlopsProfile]) -> str:
    """Format a line per pipeline rank; the slowest decides how long the others wait."""
    forwards = [profile.total.flops for profile in profiles]
    mean = sum(forwards) / len(forwards) or 1.0
    lines = ["a micro-batch at each rank of the pipeline, forward and backward:"]
    for rank, profile in enumerate(profiles):
        total = profile.total
        counts = f"{format_amount(total.flops, 'FLOPs')} + {format_amount(profile.backward_flops, 'FLOPs')}"
        lines.append(
            f"  {rank}   {format_amount(total.params)} parameters   {counts}   {total.ms:.2f} ms forward   "
            f"{total.flops / mean:.2f} of the mean"
        )
    return "\n".join(lines)
