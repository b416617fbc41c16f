#!/usr/bin/env python3
"""What telemetry costs a step, beside an engine that measures nothing.

    python packages/zengine/bench/telemetry.py              table, and results/telemetry.{md,json}
    python packages/zengine/bench/telemetry.py --quick      to see that everything works

Two views of it.  "in its calls" is the wall time of a step that passes inside the calls to the telemetry slot (spans,
micro-step, boundary), clocked around each of them while a tiny model trains: the tenth percentile and the median, and
the share of the median in a step of 50 ms.  "step" is the CPU time of the thread for a whole step, the tenth
percentile; what it is above that of an engine whose slot is the bare minimum of Python (methods that return, one
empty context manager) is all that a setting adds, caches and features included, and as restless as the machine is.
Settings take turns, `--rounds` times, each with an engine of its own; a figure is the median over rounds.
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
from collections.abc import Iterator
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


class Clocked:
    """A telemetry slot around another that adds up the time in its calls."""

    def __init__(self, slot: Any) -> None:
        self.slot = slot
        self.spent = 0.0  # seconds since somebody set it to 0

    @contextlib.contextmanager
    def clock(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.spent += time.perf_counter() - begin

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        with self.clock():
            span = self.slot.span(name)
            span.__enter__()
        yield
        with self.clock():
            span.__exit__(None, None, None)

    def micro_step_end(self) -> None:
        with self.clock():
            self.slot.micro_step_end()

    def step_end(self, report: Any) -> None:
        with self.clock():
            self.slot.step_end(report)

    def close(self) -> None:
        self.slot.close()


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


@attrs.frozen
class Sample:
    """One round of one setting, in milliseconds a step."""

    step: float  # CPU time of a whole step, tenth percentile
    calls_low: float  # wall time in telemetry's calls, tenth percentile
    calls: float  # the same, median


def measure(extra: dict[str, Any], steps: int, *, is_bare: bool) -> Sample:
    """Half of the steps undisturbed, and half with a clock around the calls."""
    torch.manual_seed(0)
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, **extra}
    engine, *_ = zengine.initialize(model=Model(), config=config)
    if is_bare:
        engine._run = attrs.evolve(engine._run, parts=attrs.evolve(engine.parts, telemetry=Bare()))
    batch, times, calls = torch.zeros(2, 8, dtype=torch.int64), [], []
    for _ in range(steps + 20):
        begin = time.thread_time()
        engine.backward(engine(batch))
        engine.step()
        times.append((time.thread_time() - begin) * 1e3)
    clocked = Clocked(engine.parts.telemetry)
    engine._run = attrs.evolve(engine._run, parts=attrs.evolve(engine.parts, telemetry=clocked))
    for _ in range(steps):
        clocked.spent = 0.0
        engine.backward(engine(batch))
        engine.step()
        calls.append(clocked.spent * 1e3)
    engine.close()
    return Sample(_low(times[20:]), _low(calls), statistics.median(calls))


def _low(values: list[float]) -> float:
    return statistics.quantiles(values, n=10)[0]


def main() -> int:
    """Rounds of all settings, then the table."""
    options = _parser().parse_args()
    logging.getLogger("zengine").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    rounds, steps = (1, 20) if options.quick else (options.rounds, options.steps)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        chosen = settings(folder)
        samples: dict[str, list[Sample]] = {name: [] for name in chosen}
        for index in range(rounds):
            for name in list(chosen)[:: 1 if index % 2 else -1]:
                with contextlib.redirect_stdout(nowhere):
                    samples[name].append(measure(chosen[name], steps, is_bare=name == BARE))
    lines = _table(samples)
    print("\n".join(lines))
    facts = {
        "machine": f"{platform.machine()}, 1 thread, torch {torch.__version__}",
        "steps": f"{steps} a round, {rounds} rounds",
        "load": f"{os.getloadavg()[0]:.1f} processes on {os.cpu_count()} cores, this one among them",
    }
    told = [f"- {key}: {value}" for key, value in facts.items()]
    if not options.quick:
        RESULTS.mkdir(parents=True, exist_ok=True)
        text = "\n".join(["# What telemetry costs a step", "", *told, "", *lines, ""])
        rows = {name: [attrs.asdict(sample) for sample in found] for name, found in samples.items()}
        (RESULTS / "telemetry.md").write_text(text)
        (RESULTS / "telemetry.json").write_text(json.dumps({"facts": facts, "ms": rows}, indent=1) + "\n")
    return 0


def _table(samples: dict[str, list[Sample]]) -> list[str]:
    """What the clock itself costs is taken off; differences of steps are those of one round."""
    lines = [
        "| telemetry | ms in its calls, low | median | share of 50 ms | step, ms CPU | more than bare |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    floor_low, floor = (statistics.median(getattr(s, name) for s in samples[BARE]) for name in ("calls_low", "calls"))
    for name, found in samples.items():
        low = statistics.median(sample.calls_low for sample in found) - floor_low
        calls = statistics.median(sample.calls for sample in found) - floor
        step = statistics.median(sample.step for sample in found)
        added = statistics.median(own.step - bare.step for own, bare in zip(found, samples[BARE]))
        lines.append(
            f"| {name} | {low:.3f} | {calls:.3f} | {100 * calls / STEP_MS:.2f} % | {step:.3f} | {added:+.3f} |"
        )
    return lines


def _parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--quick", action="store_true")
    result.add_argument("--rounds", type=int, default=7)
    result.add_argument("--steps", type=int, default=300)
    return result


if __name__ == "__main__":
    sys.exit(main())
