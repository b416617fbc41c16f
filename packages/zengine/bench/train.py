#!/usr/bin/env python3
"""How long a training step takes: the engine at every stage beside DDP, FSDP2 and DeepSpeed (when installed).

    python packages/zengine/bench/train.py                   GPT-2's 124M shape, 2 CPU ranks of one thread, fp32
    python packages/zengine/bench/train.py --bf16 --only "ours stage 3,FSDP2 + torch AdamW"
    python packages/zengine/bench/train.py --tiny            48 blocks of two Linear(64)
    python packages/zengine/bench/train.py --quick           a small model: to see that everything works

Contenders take turns, `--rounds` times; each is made anew, warms up, and trains `--steps` steps.  All clip the norm
of the gradient at 1.  Printed: medians of forward, backward and step in ms on rank 0, the ratio to DDP, and the most
memory that a rank holds in a step (weights, gradients, states, activations; shared pages count once).  The first row
is what nobody can do without: the arithmetic of the model, with both ranks busy.  The floor adds to it the bytes
that stage 2 must move (one reduce-scatter and one all-gather through shared memory) and the update of its share.
"strict" stage 3 shards every parameter and keeps nothing whole between forward and backward; the other keeps
parameters below 100,000 elements whole, and the units of the running call and the next.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import attrs
import contenders
import models
import torch
from measuring import Sample, Setting, floors, measure

import zcomm
import zoptim
from zcomm.testing import end_ranks, run_ranks

RESULTS = Path(__file__).resolve().parent / "results"
ALONE, PEER = "forward + backward alone", "DDP + torch AdamW"


def main() -> int:
    """Rounds of all contenders, then the table."""
    options = _parser().parse_args()
    small = models.Shape(depth=2, width=64, heads=2, vocabulary=256, context=64)
    setting = Setting(
        shape=small if options.quick else models.TINY if options.tiny else models.Shape(),
        bf16=options.bf16,
        micro_batch=options.micro_batch,
        tokens=32 if options.quick else options.tokens,
        steps=options.steps,
    )
    chosen = options.only or contenders.available()
    samples: dict[str, list[Sample]] = {name: [] for name in chosen}
    for round_index in range(options.rounds):
        for name in chosen:
            end_ranks()  # what one leaves in its processes is not the next one's
            samples[name].append(run_ranks(measure, options.ranks, name, setting, timeout_s=900)[0])
            print(f"round {round_index}: {name}: {samples[name][-1]}", flush=True)
    floor_ms = run_ranks(floors, options.ranks, setting, timeout_s=300)[0]
    facts = _facts(options, setting, floor_ms)
    lines = _table(samples, sum(floor_ms.values()))
    print("\n".join(lines))
    options.results.mkdir(parents=True, exist_ok=True)
    text = ["# A training step", "", *(f"- {key}: {value}" for key, value in facts.items()), "", *lines, ""]
    (options.results / f"{options.name}.md").write_text("\n".join(text))
    rows = {name: [attrs.asdict(sample) for sample in found] for name, found in samples.items()}
    (options.results / f"{options.name}.json").write_text(
        json.dumps({"facts": facts, "samples": rows}, indent=1) + "\n"
    )
    return 0


def _table(samples: dict[str, list[Sample]], floor_ms: float) -> list[str]:
    def total(name: str) -> float:
        return statistics.median(s.forward_ms + s.backward_ms + s.step_ms for s in samples[name])

    peer = total(PEER) if PEER in samples else float("nan")
    alone = total(ALONE) if ALONE in samples else float("nan")
    lines = ["| | total ms | forward | backward | step | x DDP | x floor | peak MiB |", "| --- |" + " ---: |" * 7]
    for name, found in samples.items():
        parts = [
            statistics.median(getattr(s, f"{phase}_ms") for s in found) for phase in ("forward", "backward", "step")
        ]
        cells = [total(name), *parts]
        ratios = [total(name) / peer, total(name) / (alone + floor_ms)]
        peak = statistics.median(s.peak_mib for s in found)
        lines.append(
            f"| {name} | "
            + " | ".join(f"{cell:.4g}" for cell in cells)
            + f" | {ratios[0]:.2f} | {ratios[1]:.2f} | {peak:.0f} |"
        )
    return lines


def _facts(options: argparse.Namespace, setting: Setting, floor_ms: dict[str, float]) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
        "machine": f"{platform.machine()}, {options.ranks} ranks of 1 thread",
        "versions": {"torch": torch.__version__, "zoptim": zoptim.__version__, "zcomm": zcomm.__version__},
        "model": f"{sum(p.numel() for p in models.make(setting.shape).parameters()):,} parameters, "
        f"{'bf16' if setting.bf16 else 'fp32'}, micro-batch {setting.micro_batch} x {setting.tokens} tokens",
        "steps": f"{setting.steps} timed, {options.rounds} rounds, medians",
        "floor": "forward + backward alone, and " + ", ".join(f"{k} {v:.0f} ms" for k, v in floor_ms.items()),
    }


def _parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--only", type=_known, help="contenders, by name")
    result.add_argument("--bf16", action="store_true")
    result.add_argument("--quick", action="store_true")
    result.add_argument("--tiny", action="store_true", help="48 blocks of two Linear(64)")
    result.add_argument("--ranks", type=int, default=2)
    result.add_argument("--rounds", type=int, default=2)
    result.add_argument("--steps", type=int, default=4)
    result.add_argument("--micro-batch", type=int, default=2)
    result.add_argument("--tokens", type=int, default=128)
    result.add_argument("--results", type=Path, default=RESULTS)
    result.add_argument("--name", default="train")
    return result


def _known(words: str) -> list[str]:
    given = words.split(",")
    if wrong := [word for word in given if word not in contenders.CONTENDERS]:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: it takes {', '.join(contenders.CONTENDERS)}")
    return given


if __name__ == "__main__":
    sys.exit(main())
