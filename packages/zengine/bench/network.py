#!/usr/bin/env python3
"""Step time over a network: the engine beside DDP and DeepSpeed, between two network namespaces of one machine.

    python packages/zengine/bench/network.py                          1 and 10 Gbit/s, 2 ranks, 23M parameters
    python packages/zengine/bench/network.py --links 1+0.5ms          with a delay of half a millisecond each way
    python packages/zengine/bench/network.py --ranks 4 --only "ours hybrid, stage 2,DDP"
    python packages/zengine/bench/network.py --accumulation 8 --only "ours stage 0,ours stage 1,DDP"
    python packages/zengine/bench/network.py --quick                  a small model: to see that everything works

Needs root (namespaces, veth, tc) and nothing else of the machine: the namespaces have no names and end with this
process.  Every rank has one thread; half of them live in each namespace and take it for a host (ZCOMM_HOST).
DeepSpeed takes part if the running Python has it.  The contenders take turns, `--rounds` times, each made anew.

Floors, from the same run: the arithmetic alone (all ranks busy, nothing exchanged), its forward pass alone, the
transport alone (Gloo's all_reduce of all gradients; its CPU seconds are scaled to the bytes that a contender sends),
and bytes / bandwidth.  network_report.py makes two floors of them.  Bytes are those of the interface, with headers.
`--save NAME` adds the runs to bench/results/NAME.json and writes NAME.md and NAME.svg from all runs in it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import models
import network_report
from network_contenders import CONTENDERS, Setting, available
from network_link import INTERFACE, Link, LinkSpec
from network_rank import Job

import zengine

FINDINGS = "## Findings"  # the part of a report that is written by hand, and kept
RESULTS = Path(__file__).resolve().parent / "results"
DEFAULT = models.Shape(depth=6, width=512, heads=8, vocabulary=8192, context=256)
QUICK = models.Shape(depth=2, width=64, heads=2, vocabulary=256, context=64)


def main() -> int:
    """Every contender over every link, then the report."""
    options = _parser().parse_args()
    setting = Setting(
        shape=QUICK if options.quick else DEFAULT,
        micro_batch=options.micro_batch,
        tokens=options.tokens,
        accumulation=options.accumulation,
    )
    runs = []
    for spec in options.links:
        lines = []
        for line in _measured(spec, options, setting):
            print(f"{spec}: {line['name']}: {line['ranks'][0]}", flush=True)
            lines.append(line)
        runs.append(network_report.Run.of(spec, options.ranks, setting, lines, shlex.join(sys.argv[1:])))
    print("\n".join(network_report.table(runs)))
    if options.save:
        _save(options.save, runs)
    return 0


def _save(name: str, runs: list[network_report.Run]) -> None:
    """Add runs to those that are saved, as further rounds of one of the same title, and report all."""
    data, report = RESULTS / f"{name}.json", RESULTS / f"{name}.md"
    saved = [network_report.Run.from_json(run) for run in json.loads(data.read_text())] if data.exists() else []
    titled = {run.title: run for run in saved}
    for run in runs:
        titled[run.title] = run.with_rounds_of(titled[run.title]) if run.title in titled else run
    both = list(titled.values())
    data.write_text(json.dumps([attrs.asdict(run) for run in both], indent=1) + "\n")
    (RESULTS / f"{name}.svg").write_text(network_report.picture(both))
    _, mark, findings = (report.read_text() if report.exists() else "").partition(FINDINGS)
    lines = [*_head(), f"![step times]({name}.svg)", "", *network_report.table(both)]
    report.write_text("\n".join(lines) + (f"\n{mark}{findings}" if mark else ""))


def _head() -> list[str]:
    """Date, machine, versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    versions = [f"{what} {version(what)}" for what in ("torch", "deepspeed") if importlib.util.find_spec(what)]
    return [
        "# Step time over a network",
        "",
        f"{datetime.date.today()}, {processor}, {os.cpu_count()} cores, {platform.system()}; "
        f"{', '.join([*versions, f'zengine {zengine.__version__}'])}. Made by bench/network.py; see there.",
        "",
    ]


def _measured(spec: LinkSpec, options: argparse.Namespace, setting: Setting) -> Iterator[dict[str, Any]]:
    """Start the ranks, and yield what rank 0 prints."""
    with Link(spec) as link, tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        started = []
        for rank in range(options.ranks):
            job = Job(
                rank=rank,
                world=options.ranks,
                store=f"{folder}/store",
                names=tuple(options.only or available(options.ranks)),
                rounds=options.rounds,
                steps=options.steps,
                setting=setting,
            )
            started.append(stack.enter_context(_process(link, job)))
        output = started[0].stdout
        assert output is not None
        yield from (json.loads(line) for line in output if line.startswith("{"))
        if any(process.wait(timeout=60) for process in started):
            raise RuntimeError(f"a rank failed; {spec}")


@contextlib.contextmanager
def _process(link: Link, job: Job) -> Iterator[subprocess.Popen[str]]:
    """One rank, which ends with its standard input."""
    host = job.rank * 2 // job.world
    per_host = job.world // 2
    ranks = {"RANK": job.rank, "WORLD_SIZE": job.world, "LOCAL_RANK": job.rank % per_host, "LOCAL_SIZE": per_host}
    ranks["LOCAL_WORLD_SIZE"] = per_host
    environ = {
        **os.environ,
        **{name: str(value) for name, value in ranks.items()},
        "OMP_NUM_THREADS": "1",
        "ZCOMM_HOST": f"host{host}",
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    command = [sys.executable, str(Path(__file__).with_name("network_rank.py")), json.dumps(attrs.asdict(job))]
    process = subprocess.Popen(
        link.inside(host, command),
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if job.rank == 0 else subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--links", type=LinkSpec.parse, nargs="+", default=[LinkSpec(1), LinkSpec(10)])
    result.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    result.add_argument("--only", type=_known, help="contenders, separated by semicolons")
    result.add_argument("--quick", action="store_true")
    result.add_argument("--rounds", type=int, default=2)
    result.add_argument("--steps", type=int, default=3)
    result.add_argument("--micro-batch", type=int, default=2)
    result.add_argument("--tokens", type=int, default=128)
    result.add_argument("--accumulation", type=int, default=1)
    result.add_argument("--save", help="name of the files in bench/results")
    return result


def _known(words: str) -> list[str]:
    given = words.split(";")
    if wrong := [word for word in given if word not in CONTENDERS]:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: it takes {', '.join(CONTENDERS)}")
    return given


if __name__ == "__main__":
    sys.exit(main())
