"""`flops_profiler` in a pipeline: one batch of the run is counted on every stage, and rank 0 tells of the model.

The ranks of the pipeline that begins at rank 0 count the first batch that begins when `profile_step` steps are done:
forwards by module, and the backward as a whole, over all micro-batches; what is told is one of them.  At the end of
the batch the ranks tell rank 0, which has the table of the model, with a line for each stage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import attrs
import torch

import zcomm
from zengine.features.base import Feature
from zengine.features.flops_profile import FILE
from zengine.telemetry.flops import FlopsProfile
from zengine.telemetry.flops_meter import make_counter
from zengine.telemetry.flops_profiler import FlopsProfiler, publish
from zengine.telemetry.flops_stages import averaged, joined, stage_lines
from zengine.telemetry.flops_table import format_profile
from zengine.telemetry.sinks import training_goes_on
from zpartition.pipeline import Passes

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

    from zengine.config.profiling import FlopsPlan
    from zengine.pipeline_engine import PipelineEngine
    from zengine.report import StepReport
    from zpartition.pipeline import PipelineModule


@final
@attrs.define(eq=False)
class CountedPasses(Passes):
    """The passes of an engine, counted while they train."""

    inner: Passes
    profiler: FlopsProfiler
    backward_flops: int = 0  # of the batch so far

    def forward(self, module: PipelineModule, stage: int, value: Any, around: Any) -> Any:
        """Counted by module, unless it is part of an evaluation."""
        if not torch.is_grad_enabled():
            return self.inner.forward(module, stage, value, around)
        self.profiler.resume_profile()
        try:
            return self.inner.forward(module, stage, value, around)
        finally:
            self.profiler.stop_profile()

    def loss(self, loss_fn: Callable[[Any, Any], Any], output: Any, labels: Any) -> Any:
        """Not counted: it is no module's."""
        return self.inner.loss(loss_fn, output, labels)

    def share(self, loss: Tensor, micro_batches: int) -> Tensor:
        """As ever."""
        return self.inner.share(loss, micro_batches)

    @contextmanager
    def backward(self, *, is_last: bool) -> Iterator[None]:
        """Counted as a whole."""
        counter = make_counter()
        with self.inner.backward(is_last=is_last), counter:
            yield
        self.backward_flops += int(counter.get_total_flops())

    def whole(self, params: Iterable[Parameter]) -> AbstractContextManager[Any]:
        """As ever."""
        return self.inner.whole(params)


@final
class StageFlops(Feature):
    """Measures one batch.  Invariant: `counted` holds the passes exactly while a batch is to be counted."""

    def __init__(self, plan: FlopsPlan, folder: Path | None) -> None:
        """folder: of the run, for flops.json; None for none."""
        self._plan = plan
        self._folder = folder
        self._counted: list[CountedPasses] = []
        self._waits = True  # for the batch that is to be counted

    def attach(self, engine: PipelineEngine) -> None:  # type: ignore[override]
        self._engine = engine
        groups = engine.parts.groups
        self._waits = int(groups.table.min()) in groups.ranks("pipeline")
        self._begin_if_due()

    def step_end(self, report: StepReport) -> None:
        while self._counted:
            passes = self._counted.pop()
            self._engine.pipeline.passes = passes.inner
            self._tell(averaged(passes.profiler.profile(passes.backward_flops), self._engine.micro_batches))
        self._begin_if_due()

    def _begin_if_due(self) -> None:
        engine = self._engine
        if self._waits and engine.clock.steps >= self._plan.profile_step:
            self._waits = False
            profiler = FlopsProfiler(engine.module, engine, self._plan.recompute_fwd_factor)
            passes = CountedPasses(engine.pipeline.passes, profiler)
            engine.pipeline.passes = passes
            self._counted.append(passes)

    def _tell(self, own: FlopsProfile) -> None:
        """Bring the stages together on the first rank.  A collective of the pipeline."""
        engine, plan, cell = self._engine, self._plan, self._engine.module.stage_cell()
        told = [own.as_json()] if cell.size == 1 else zcomm.exchange(own.as_json(), cell.group)
        if cell.rank:
            return
        stages = [FlopsProfile.from_json(each) for each in told]
        profile, step = joined(stages), engine.clock.steps - 1
        text = format_profile(
            profile, step=step, module_depth=plan.module_depth, top_modules=plan.top_modules, detailed=plan.detailed
        )
        with training_goes_on(f"the table of FLOPs in {plan.output_file or 'the standard output'}"):
            publish(f"{text}\n\n{stage_lines(stages)}", plan.output_file)
        if self._folder is not None:
            self._write(self._folder, profile, stages, step)

    def _write(self, folder: Path, profile: FlopsProfile, stages: list[FlopsProfile], step: int) -> None:
        keys = ("params", "flops", "ms")
        rows = [
            {"backward_flops": each.backward_flops, **{key: getattr(each.total, key) for key in keys}}
            for each in stages
        ]
        facts = {"step": step, "micro_batch_size": self._engine.plan.batch.micro_batch_size, "stages": rows}
        with training_goes_on(f"{FILE} in {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / FILE).write_text(json.dumps({**facts, **profile.as_json()}) + "\n", encoding="utf-8")
