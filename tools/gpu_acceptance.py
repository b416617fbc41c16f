#!/usr/bin/env python3
"""Prove on one NVIDIA GPU what the tests cannot: bits, order, speed.  Run it again to go on where it was ended.

    python tools/gpu_acceptance.py                      every piece; the report goes to bench/results/gpu
    python tools/gpu_acceptance.py --minutes 9          no more than nine minutes now
    python tools/gpu_acceptance.py --only offload       one piece; --list shows them
    python tools/gpu_acceptance.py --device simulated   bits and order on a device in host memory; nothing is measured
    python tools/gpu_acceptance.py --write-readme       what the READMEs say about GPUs, from the reports

Needs torch with CUDA, attrs, numpy, pytest, safetensors and xxhash; CuPy for the GPU kernels; cffi, hatchling and a C
compiler for the CPU kernels that these are compared with.  A piece that lacks something is not run, and says what.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from acceptance import places, readme
from acceptance.plants import PLANTS
from acceptance.report import write_report
from acceptance.runner import Memory, Runner, key_of
from acceptance.table import PIECES, choose
from acceptance.verdict import State

SCHEDULES = "early, late or random:SEED"


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--list", action="store_true", help="print the pieces")
    result.add_argument("--only", default="", metavar="NAMES", help="only these pieces, separated by commas")
    result.add_argument("--again", action="store_true", help="also what has passed before")
    result.add_argument("--minutes", type=float, default=24 * 60.0, help="start no piece that could end later")
    result.add_argument("--device", choices=("cuda", "simulated"), default="cuda")
    result.add_argument("--schedule", default="late", help=f"of the simulated device: {SCHEDULES}")
    result.add_argument("--state", type=Path, help="file with the verdicts so far")
    result.add_argument("--results", type=Path, help="folder of the report")
    result.add_argument("--plant", default="", help=f"fail on purpose, without a report: {', '.join(PLANTS)}")
    result.add_argument("--write-readme", action="store_true", help="write the blocks about GPUs into the READMEs")
    result.add_argument("--child", default="", help=argparse.SUPPRESS)
    result.add_argument("--target", default="", help=argparse.SUPPRESS)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Phases: read the options, ask for the device, run the pieces, write the report."""
    options = parser().parse_args(arguments)
    if options.child:
        from acceptance import child

        return child.main(options.child, options.target, options.results, options.plant)
    if options.list:
        print("\n".join(f"{piece.name:14}{piece.limit_s:4} s at most  {piece.title}" for piece in PIECES))
        return 0
    if options.write_readme:
        print("\n".join(readme.write()))
        return 0
    try:
        return run(options)
    except (ValueError, RuntimeError) as error:
        print(f"gpu_acceptance: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    """Run the chosen pieces; return 1 if one failed.  A planted fault leaves no verdict and no report."""
    if options.plant and options.plant not in PLANTS:
        raise ValueError(f"--plant {options.plant}: no such fault; choose from {', '.join(PLANTS)}")
    pieces = choose(PLANTS[options.plant].piece if options.plant and not options.only else options.only)
    results = options.results or (places.RESULTS if options.device == "cuda" else places.CACHE)
    runner = Runner(
        environ=places.child_environment(options.device, options.schedule),
        results=results,
        deadline=time.monotonic() + 60 * options.minutes,
        log=lambda line: print(line, flush=True),
        plant=options.plant,
    )
    notes = [note for note in places.build_kernels().values() if note]
    facts = {**runner.facts(), "commit": places.commit(), "sources": places.sources_digest(), "notes": notes}
    key = key_of(facts)
    print("\n".join([key, *notes]), flush=True)
    memory = Memory.open(options.state or places.CACHE / f"{options.device}.json")
    verdicts = runner.run(pieces, memory, key, options.again)
    if not options.plant:
        print("\n".join(map(str, write_report(results, facts, memory.of(key)))))
    states = [verdict.state for verdict in verdicts.values()]
    print(json.dumps({state.value: states.count(state) for state in State}))
    return 1 if State.FAILED in states else 0


if __name__ == "__main__":
    sys.exit(main())
