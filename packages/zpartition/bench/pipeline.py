"""The bubble of a pipeline, measured beside its formula and torch's own schedule.

    python packages/zpartition/bench/pipeline.py [--name NAME]

Two measurements, since two cores cannot compute four stages at once:

    asleep    layers that sleep in place of computing (a forward 4 ms, each half of a backward as much), so that any
              number of stages runs on any machine; 2 and 4 stages.  What is measured is the runner and its messages.
    compute   real layers, 2 stages on 2 cores of one thread, against the same batch in one process.

The bubble is ranks x time / work - 1.  Asleep, the work is known; computing, it is the time of one process.
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
from zpartition.pipeline import PipelineModule, PipelineRunner, make_schedule, predict
from zpartition.pipeline.deferral import LaterProducts

UNIT_S = 0.004
MICRO = 8


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
    """A stage of one unit forward; backward two, or one and one where it comes in halves."""

    def __init__(self, halves: bool) -> None:
        super().__init__()
        self.linear, self.backward_s = nn.Linear(4, 4), (1 if halves else 2) * UNIT_S

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return _Asleep.apply(self.linear(value), self.backward_s)


def asleep(schedule: str, per_rank: int, rounds: int) -> float:
    """Median seconds of a batch."""
    halves, ranks = schedule == "zero_bubble", torch.distributed.get_world_size()
    finish = LaterProducts.finish

    def slow_finish(self: LaterProducts) -> None:
        if halves:
            time.sleep(UNIT_S)
        finish(self)

    LaterProducts.finish = slow_finish
    layers = [Asleep(halves) for _ in range(ranks * per_rank)]
    return _timed(layers, schedule, per_rank, rounds, torch.randn(2, 4, requires_grad=True))


def compute(schedule: str, ranks: int, rounds: int) -> float:
    """Median seconds of a batch of real layers."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768)) for _ in range(8)]
    data = torch.randn(256, 768, requires_grad=True)
    return _timed(layers, schedule, 1, rounds, data, ranks)


def _timed(
    layers: list[nn.Module], schedule: str, per_rank: int, rounds: int, data: torch.Tensor, ranks: int | None = None
) -> float:
    count = ranks or torch.distributed.get_world_size()
    model = PipelineModule(
        layers, num_stages=count, loss_fn=lambda out, label: out.square().mean(), partition_method="uniform",
        stages_per_rank=per_rank,
    )  # fmt: skip
    runner, times = PipelineRunner.over(model, schedule), []
    for _ in range(rounds + 1):
        torch.distributed.barrier()
        start = time.perf_counter()
        runner.train_batch(iter([(data, None)] * MICRO), MICRO)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="", help="keep the figures under this name in results/")
    given = parser.parse_args()
    rows = []
    for ranks in (2, 4):
        for schedule, per_rank in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)):
            seconds = max(run_ranks(asleep, ranks, schedule, per_rank, given.rounds))
            work = ranks * per_rank * MICRO * 3 * UNIT_S
            theory = predict(make_schedule(schedule, ranks, MICRO, per_rank)).bubble
            rows.append((f"asleep, {ranks} stages a turn, {schedule}", ranks * seconds / work - 1, theory, seconds))
    alone = run_ranks(compute, 1, "1f1b", 1, given.rounds, timeout_s=300)[0]
    for schedule in ("gpipe", "1f1b", "zero_bubble"):
        seconds = max(run_ranks(compute, 2, schedule, 2, given.rounds, timeout_s=300))
        theory = predict(make_schedule(schedule, 2, MICRO)).bubble
        rows.append((f"compute, 2 stages, {schedule}", 2 * seconds / alone - 1, theory, seconds))
    peer = max(run_ranks(torchs, 2, given.rounds, timeout_s=300))
    rows.append(("compute, 2 stages, torch Schedule1F1B", 2 * peer / alone - 1, 1 / MICRO, peer))
    lines = [f"# The bubble of a pipeline: {MICRO} micro-batches", "", "| | bubble | formula | time / ideal | ms |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    lines += [
        f"| {name} | {bubble:.3f} | {theory:.3f} | {(1 + bubble) / (1 + theory):.2f} | {1e3 * seconds:.1f} |"
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
