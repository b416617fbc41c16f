#!/usr/bin/env python3
"""What telemetry costs a step, beside an engine that measures nothing.

    python packages/zengine/bench/telemetry.py              table, and results/telemetry.{md,json}
    python packages/zengine/bench/telemetry.py --quick      to see that everything works

A step of a tiny model is nearly all overhead, so what a setting adds to it is what it adds to any step on the host.
Times are the thread's own (CPU), at the tenth percentile of a round: what else the machine does is not in them.
Settings take turns, `--rounds` times, each with an engine of its own; a figure is the median over rounds of the
median step.  "share" is of a step of 50 ms.  "off" is compared with an engine whose telemetry slot is the bare
minimum of Python: methods that return, and one empty context manager.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

import zengine

RESULTS = Path(__file__).resolve().parent / "results"
BARE, OFF = "nothing at all", "off (default)"
STEP_MS = 50.0


class Model(nn.Module):
    """A language model of a few thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"n_layer": 4, "n_embd": 16}
        self.tokens = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


class Bare:
    """A telemetry slot that cannot be cheaper."""

    nothing = contextlib.nullcontext()

    def span(self, name: str) -> Any:
        return self.nothing

    def micro_step_end(self) -> None: ...

    def step_end(self, report: Any) -> None: ...

    def close(self) -> None: ...


def settings(folder: str) -> dict[str, dict[str, Any]]:
    """Name -> what the config adds."""

    def to(name: str, **more: Any) -> dict[str, Any]:
        return {"enabled": True, "output_path": folder, "job_name": name, **more}

    phases = {"wall_clock_breakdown": True}
    lines = {**phases, "steps_per_print": 10}
    return {
        BARE: {},
        OFF: {},
        "TensorBoard": {"tensorboard": to("a")},
        "TensorBoard, phases": {"tensorboard": to("b"), **phases},
        "TensorBoard, JSONL, phases, lines": {"tensorboard": to("c"), "jsonl_monitor": to("c"), **lines},
        "all that and memory by phase, collectives, histograms": {
            "tensorboard": to("d", gradient_histograms=100),
            "jsonl_monitor": to("d"),
            "memory_breakdown": True,
            "comms_logger": {"enabled": True},
            **lines,
        },
        "CSV": {"csv_monitor": to("e")},
    }


def measure(extra: dict[str, Any], steps: int, *, is_bare: bool) -> float:
    """Milliseconds of a step, the tenth percentile."""
    torch.manual_seed(0)
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **extra}
    engine, *_ = zengine.initialize(model=Model(), config=config)
    if is_bare:
        engine.parts = attrs.evolve(engine.parts, telemetry=Bare())
    batch, times = torch.zeros(2, 8, dtype=torch.int64), []
    for _ in range(steps + 20):
        begin = time.thread_time()
        engine.backward(engine(batch))
        engine.step()
        times.append((time.thread_time() - begin) * 1e3)
    engine.close()
    return statistics.quantiles(times[20:], n=10)[0]


def main() -> int:
    """Rounds of all settings, then the table."""
    options = _parser().parse_args()
    logging.getLogger("zengine").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rounds, steps = (1, 20) if options.quick else (options.rounds, options.steps)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        chosen = settings(folder)
        samples: dict[str, list[float]] = {name: [] for name in chosen}
        for index in range(rounds):
            for name in list(chosen)[:: 1 if index % 2 else -1]:
                with contextlib.redirect_stdout(nowhere):
                    samples[name].append(measure(chosen[name], steps, is_bare=name == BARE))
    lines = _table(samples)
    print("\n".join(lines))
    facts = {
        "machine": f"{platform.machine()}, 1 thread, torch {torch.__version__}",
        "steps": f"{steps} a round, {rounds} rounds, medians",
    }
    told = [f"- {key}: {value}" for key, value in facts.items()]
    if not options.quick:
        RESULTS.mkdir(parents=True, exist_ok=True)
        text = "\n".join(["# What telemetry costs a step", "", *told, "", *lines, ""])
        (RESULTS / "telemetry.md").write_text(text)
        (RESULTS / "telemetry.json").write_text(json.dumps({"facts": facts, "ms": samples}, indent=1) + "\n")
    return 0


def _table(samples: dict[str, list[float]]) -> list[str]:
    """Differences to the bare engine are of the same round, so that a busy machine counts for both."""
    lines = ["| telemetry | ms a step | adds, ms | share of a step of 50 ms |", "| --- | ---: | ---: | ---: |"]
    for name, found in samples.items():
        added = statistics.median(own - bare for own, bare in zip(found, samples[BARE]))
        share = 100 * added / STEP_MS
        lines.append(f"| {name} | {statistics.median(found):.3f} | {added:+.3f} | {share:+.2f} % |")
    return lines


def _parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--quick", action="store_true")
    result.add_argument("--rounds", type=int, default=7)
    result.add_argument("--steps", type=int, default=300)
    return result


if __name__ == "__main__":
    sys.exit(main())
