"""The bubble of a pipeline, measured, beside its formula and torch's own schedule.

    python packages/zpartition/bench/pipeline.py [--name NAME]

Two measurements, since two cores cannot compute four stages at once:

    asleep    layers that sleep instead of computing (a forward 40 ms, each half of a backward as much), so that any
              number of stages runs on any machine; 2 and 4 stages.  This measures the runner and its messages.
    compute   real layers, 2 stages on 2 cores of one thread, against the same batch in one process.

The bubble is ranks x time / work - 1.  For sleeping layers the work is the time of the actions (`Recorder`: sleeps
last longer than requested); for computing ones it is the time of one process.  --picture FILE draws the last schedule
of 4 sleeping stages, as predicted and as measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zcomm.testing import run_ranks
from zpartition.pipeline import (
    PipelineModule,
    PipelineRunner,
    Recorder,
    comparison_svg,
    make_schedule,
    simulate,
    simulate_measured,
)
from zpartition.pipeline.deferral import DeferredWeightGrads

UNIT_S = 0.04
MICRO = 8
TURNS = 3
Row = tuple[str, float, float, float]  # what, bubble, bubble by the formula, seconds of a batch


class _Asleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, backward_s: float) -> torch.Tensor:
        time.sleep(UNIT_S)
        ctx.backward_s = backward_s
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None


class Asleep(nn.Module):
    """Stage of one time unit forward, and two backward, or one and one if backward is split."""

    def __init__(self, halves: bool) -> None:
        super().__init__()
        self.linear, self.backward_s = nn.Linear(4, 4), (1 if halves else 2) * UNIT_S

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return _Asleep.apply(self.linear(value), self.backward_s)


def asleep(schedule: str, per_rank: int, rounds: int) -> tuple[float, float, str]:
    """Median bubble and seconds of a batch, and a picture of the last one."""
    halves, ranks = schedule == "zero_bubble", torch.distributed.get_world_size()
    finish = DeferredWeightGrads.finish

    def slow_finish(self: DeferredWeightGrads) -> None:
        time.sleep(UNIT_S * bool(self.factors))
        finish(self)

    layers = [Asleep(halves) for _ in range(ranks * per_rank)]
    runner = _runner(layers, schedule, per_rank, ranks)
    data, found = torch.randn(2, 4, requires_grad=True), []
    DeferredWeightGrads.finish = slow_finish
    try:
        for _ in range(rounds + 1):
            recorder = Recorder(runner.module)
            runner.train_batch(iter([(data, None)] * MICRO), MICRO, observe=recorder)
            found.append(recorder.timeline())
    finally:
        DeferredWeightGrads.finish = finish  # ranks live on
    timelines = sorted(found[1:], key=lambda each: each.bubble)
    median = timelines[len(timelines) // 2]
    return median.bubble, median.span, comparison_svg(simulate_measured(runner.schedule(MICRO), median), median)


def compute(schedule: str, ranks: int, rounds: int) -> float:
    """Median seconds of a batch of real layers."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768)) for _ in range(8)]
    data = torch.randn(256, 768, requires_grad=True)
    runner, times = _runner(layers, schedule, 1, ranks), []
    for _ in range(rounds + 1):
        torch.distributed.barrier()
        start = time.perf_counter()
        runner.train_batch(iter([(data, None)] * MICRO), MICRO)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _runner(layers: list[nn.Module], schedule: str, per_rank: int, ranks: int) -> PipelineRunner:
    model = PipelineModule(
        layers, num_stages=ranks, loss_fn=lambda out, label: out.square().mean(), partition_method="uniform",
        stages_per_rank=per_rank,
    )  # fmt: skip
    return PipelineRunner.over(model, schedule)


def torchs(rounds: int) -> float:
    """The same real layers under torch.distributed.pipelining's 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768)) for _ in range(8)]
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    part = nn.Sequential(*layers[rank * len(layers) // ranks : (rank + 1) * len(layers) // ranks])
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    schedule, times = Schedule1F1B(stage, MICRO, loss_fn=lambda out, label: out.square().mean()), []
    batch = torch.randn(256 * MICRO, 768)
    for _ in range(rounds + 1):
        torch.distributed.barrier()
        start = time.perf_counter()
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=torch.zeros(256 * MICRO))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def sleeping(rounds: int, file: str) -> list[Row]:
    """Every schedule, at 2 and 4 stages."""
    rows: list[Row] = []
    for ranks in (2, 4):
        for schedule, per_rank in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)):
            bubble, seconds, drawn = run_ranks(asleep, ranks, schedule, per_rank, rounds, timeout_s=300)[0]
            theory = simulate(make_schedule(schedule, ranks, MICRO, per_rank)).bubble
            rows.append((f"asleep, {ranks} ranks, {schedule}", bubble, theory, seconds))
            if file:
                Path(file).write_text(drawn + "\n")
    return rows


def computing(rounds: int) -> list[Row]:
    """Two stages on two cores, and torch's: in turns, each beside one process, since machine speed varies."""
    turns: dict[str, list[tuple[float, float]]] = {}
    for _ in range(TURNS):
        alone = run_ranks(compute, 1, "1f1b", 1, rounds, timeout_s=300)[0]
        for schedule in ("gpipe", "1f1b", "zero_bubble"):
            seconds = max(run_ranks(compute, 2, schedule, 2, rounds, timeout_s=300))
            turns.setdefault(schedule, []).append((2 * seconds / alone - 1, seconds))
        peer = max(run_ranks(torchs, 2, rounds, timeout_s=300))
        turns.setdefault("torch Schedule1F1B", []).append((2 * peer / alone - 1, peer))
    rows: list[Row] = []
    for name, found in turns.items():
        theory = simulate(make_schedule(name if "torch" not in name else "1f1b", 2, MICRO)).bubble
        bubble, seconds = statistics.median_low(found)
        rows.append((f"compute, 2 ranks, {name}", bubble, theory, seconds))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="", help="keep the figures under this name in results/")
    parser.add_argument("--picture", default="", metavar="FILE", help="an SVG of 4 ranks")
    parser.add_argument("--asleep", action="store_true", help="leave the second measurement out")
    given = parser.parse_args()
    rows = sleeping(given.rounds, given.comparison_svg) + ([] if given.asleep else computing(given.rounds))
    lines = [f"# The bubble of a pipeline: {MICRO} micro-batches", "", "| | bubble | formula | time / ideal | ms |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    lines += [
        f"| {name} | {bubble:.3f} | {theory:.3f} | {(1 + bubble) / (1 + theory):.3f} | {1e3 * seconds:.1f} |"
        for name, bubble, theory, seconds in rows
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if given.name:
        folder = Path(__file__).with_name("results")
        (folder / f"{given.name}.md").write_text(text)
        (folder / f"{given.name}.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
