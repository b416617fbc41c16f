#!/usr/bin/env python3
"""The time of optimizer steps: zoptim, torch, DeepSpeed, numpy, and the floor.

    python packages/zoptim/bench/step.py                         every case, 1M, 10M and 100M parameters, on the CPU
    python packages/zoptim/bench/step.py --only adamw,offload --total 10M --shapes flat
    python packages/zoptim/bench/step.py --device cuda           float32, split, offload and boundary, 100M and 1G
    python packages/zoptim/bench/step.py --only import           the cost of `import zoptim` beyond `import torch`

All contenders of a case work on the same memory and run round-robin in one process; the floor is a loop (on a GPU: a
copy) that only moves the bytes of the step.  Before timing, all contenders update a small model, and those with other
results are left out.  Prints tables; writes NAME.json, NAME.md and NAME.svg into results/.  The 100M cases need up to
5 GB.  DeepSpeed takes part if it is installed; its kernels compile for two minutes each on first use.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import machine
import plot
import report
import torch
from agree import drop_disagreeing
from arena import SHAPES, Arena, numels_of
from cases import CASES, Case
from contenders import Step, Unavailable
from floors import copy_floor, cpu_floor
from report import FLOOR, Table
from timing import Sampling, count_launches, in_graph, run_rounds

RESULTS = Path(__file__).resolve().parent / "results"
TOTALS = {"cpu": "1M,10M,100M", "cuda": "100M,1G"}
MUCH = 0.1  # cores that other processes may use in an undisturbed measurement
UNITS = {"k": 10**3, "M": 10**6, "G": 10**9}


def main(arguments: Sequence[str] | None = None) -> int:
    """Phases: read the options, measure case by case, print as they come, save after each."""
    options = _parser().parse_args(arguments)
    device = torch.device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    totals = [_count(word) for word in (options.total or TOTALS[device.type]).split(",")]
    usual = [case.name for case in CASES if case.on_gpu or device.type == "cpu"]
    only = options.only or [*usual, "import"]
    cases = [_without(case, options.without) for case in CASES if case.name in only]
    facts = machine.facts(device)
    imports = machine.import_cost() if "import" in only else None
    if imports:
        print("import:", ", ".join(f"{name} {value}" for name, value in imports.items()))
    sampling = Sampling(options.rounds, options.seconds, options.warm, options.wait)
    facts["caches"] = "warm" if options.warm or device.type == "cuda" else "cold"
    tables: list[Table] = []
    for case in cases:
        case, strangers = drop_disagreeing(case, device)
        for total, shape in itertools.product(totals, options.shapes):
            table = measure_undisturbed(options.again, case, shape, total, device, sampling)
            tables.append(attrs.evolve(table, notes=(*strangers, *table.notes)))
            print(report.text(tables[-1]), end="\n\n", flush=True)
            _save(options, tables, facts, imports)
    for path in _save(options, tables, facts, imports):
        print(path)
    for verdict in report.verdicts(tables):
        print(verdict.line)
    return 0


def measure_undisturbed(tries: int, *what: Any) -> Table:
    """`measure`, repeated up to `tries` times while other processes disturb; return the least disturbed table."""
    best = measure(*what)
    for _ in range(tries):
        if (best.others or 0.0) <= MUCH:
            break
        best = min(best, measure(*what), key=lambda table: table.others or 0.0)
    return best


def measure(case: Case, shape: str, total: int, device: torch.device, sampling: Sampling) -> Table:
    """One table."""
    machine.wait_until_idle(sampling.patience, MUCH)
    load = machine.load()
    arena = Arena(numels_of(shape, total), device)
    steps, notes = _prepare(case, arena)
    watch = machine.Watch()
    samples = run_rounds(steps, sampling, device)
    others = watch.others()
    if device.type == "cuda" and "ours" in steps:
        notes.append(f"launches of one step of ours: {_launches(steps['ours'])}")
    num_tensors = len(arena.numels)
    del steps, arena
    gc.collect()  # before the next case allocates as much
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Table(
        case=case,
        shape=shape,
        num_tensors=num_tensors,
        total=total,
        device=device.type,
        samples=samples,
        notes=tuple(notes),
        load=load,
        others=others,
    )


def _prepare(case: Case, arena: Arena) -> tuple[dict[str, Step], list[str]]:
    """Prepare the floor and all contenders that can run here, with notes on the others."""
    steps: dict[str, Step] = {}
    notes: list[str] = []

    def enter(name: str, prepare: Any) -> None:
        try:
            steps[name] = prepare()
        except Unavailable as reason:
            notes.append(f"{name}: {reason}")
        except Exception as error:  # a broken contender must not stop the others
            traceback.print_exc()
            notes.append(f"{name}: {type(error).__name__}: {error}")

    enter(FLOOR, lambda: _floor(case, arena))
    for contender in case.contenders:
        if arena.device.type in contender.devices:
            enter(contender.name, lambda contender=contender: contender.prepare(arena))
    if arena.device.type == "cuda" and "ours" in steps:
        enter("ours, CUDA graph", lambda: in_graph(case.contenders[0].prepare(arena)))
    return steps, notes


def _floor(case: Case, arena: Arena) -> Step:
    if arena.device.type == "cuda":
        return copy_floor(int(case.bytes_per_param * arena.total), arena.device)
    return cpu_floor(case.loop, [arena.get(stream.name, stream.dtype) for stream in case.streams])


def _launches(step: Step) -> str:
    try:
        return str(count_launches(step))
    except Exception as error:  # no profiler on this machine
        return f"not counted ({error})"


def _save(options: Any, tables: list[Table], facts: dict[str, Any], imports: Any) -> list[Path]:
    name = options.name or f"step-{options.device}-{time.strftime('%Y-%m-%d')}"
    files = report.save(options.results, name, tables, facts, imports)
    if tables:
        where = facts.get("gpu") or f"{facts['processor']}, {facts['threads']} threads"
        files.append(options.results / f"{name}.svg")
        files[-1].write_text(plot.svg(tables, f"Optimizer steps, {where}, {facts['date']}"), encoding="utf-8")
    return files


def _without(case: Case, left_out: Sequence[str]) -> Case:
    """The case without contenders whose names begin with one of `left_out`; the first, ours, stays."""
    first, *others = case.contenders
    kept = [other for other in others if not other.name.startswith(tuple(left_out))]
    return attrs.evolve(case, contenders=(first, *kept))


def _count(word: str) -> int:
    """'10M' -> 10000000."""
    unit = UNITS.get(word[-1:], 1)
    return int(float(word[:-1] if unit > 1 else word) * unit)


def _some_of(known: Sequence[str]) -> Any:
    def parse(words: str) -> list[str]:
        given = words.split(",")
        wrong = [word for word in given if word not in known]
        if wrong:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: it takes {', '.join(known)}")
        return given

    return parse


def _parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*(case.name for case in CASES), "import"]
    result.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    result.add_argument(
        "--only", type=_some_of(names), help=f"of {','.join(names)}; on a GPU the first four by default"
    )
    result.add_argument("--total", help="parameters, such as 1M,10M (default 1M,10M,100M; on a GPU 100M,1G)")
    result.add_argument("--shapes", type=_some_of(list(SHAPES)), default=list(SHAPES), help="of flat,gpt2")
    result.add_argument("--without", type=lambda words: words.split(","), default=[], help="such as numpy,DeepSpeed")
    result.add_argument("--rounds", type=int, default=15, help="most rounds (15)")
    result.add_argument(
        "--seconds", type=float, default=2.0, help="after which a contender stops, after three rounds (2)"
    )
    result.add_argument(
        "--wait", type=float, default=0, help="most seconds to wait for other processes to be idle (0)"
    )
    result.add_argument("--again", type=int, default=0, help="repetitions while other processes disturb (0)")
    result.add_argument("--warm", action="store_true", help="do not flush the caches between calls (CPU)")
    result.add_argument("--threads", type=int, help="torch's number of threads (default: torch's)")
    result.add_argument("--results", type=Path, default=RESULTS, help="folder for the report")
    result.add_argument("--name", help="of the report's files (default step-DEVICE-DATE)")
    return result


if __name__ == "__main__":
    sys.exit(main())
