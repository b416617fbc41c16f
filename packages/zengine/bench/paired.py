#!/usr/bin/env python3
"""Two checkouts side by side: how long one takes over the other, with a 95% interval.

    git worktree add /tmp/before COMMIT                       build its kernels there: tools/dev.py --here build
    python packages/zengine/bench/paired.py /tmp/before       every case, this checkout over that one
    python packages/zengine/bench/paired.py /tmp/before --only "all_reduce;stage 3" --starts 6

Both checkouts have processes of their own that live side by side and take turns, call by call (A B, B A, ...), so a
slow moment of the machine meets both.  A pair gives one ratio, a start of the processes the median of its pairs.
Where memory lies in a process changes its speed by a few percent for all its life; therefore the interval is that of
the mean over several starts, not over pairs.  Imports are fresh processes, measured in processor time.

Cases: steps of zoptim (flat, cold caches), collectives of two ranks (float32; zero copy, and staged from ordinary
memory), training steps of a small GPT on two ranks at every stage, a step and an `initialize` of a tiny model,
imports.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paired_worker import CASES

HERE = Path(__file__).resolve()
PACKAGES = ("zcomm", "zprecision", "zpartition", "zoptim", "zckpt", "zengine")
FEWEST_PAIRS = 4
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}  # 97.5%, by starts
IMPORTS = {
    "import zoptim": "import zoptim",
    "import zoptim, touch AdamW": "import zoptim; zoptim.AdamW",
    "import zengine, touch initialize": "import zengine; zengine.initialize",
    "import zengine.deepspeed, touch initialize": "import zengine.deepspeed as d; d.initialize",
}
Call = Callable[[], float]  # milliseconds


def main() -> int:
    """Phases: choose the cases, measure each over several starts, print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the checkout to compare with; its kernels are compiled")
    parser.add_argument("--after", type=Path, default=HERE.parents[3])
    parser.add_argument("--only", default="", help="parts of the names of cases, separated by semicolons")
    parser.add_argument("--starts", type=int, choices=sorted(STUDENT), default=4)
    parser.add_argument("--seconds", type=float, default=3.0, help="of measuring in each start")
    options = parser.parse_args()
    words = options.only.split(";")
    names = [name for name in (*CASES, *IMPORTS) if any(word in name for word in words)]
    print("| | before ms | after ms | after / before | 95% |\n| --- | ---: | ---: | ---: | --- |")
    for name in names:
        starts = [_start(name, (options.before, options.after), options.seconds) for _ in range(options.starts)]
        before, after = (statistics.median(column) for column in list(zip(*starts))[:2])
        logs = [math.log(ratio) for *_, ratio in starts]
        mean = statistics.mean(logs)
        half = STUDENT[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
        low, high = math.exp(mean - half), math.exp(mean + half)
        print(f"| {name} | {before:.3f} | {after:.3f} | {math.exp(mean):.3f} | {low:.3f}-{high:.3f} |", flush=True)
    return 0


def _start(name: str, trees: tuple[Path, Path], seconds: float) -> tuple[float, float, float]:
    """Return the medians of both checkouts in ms, and the median ratio, of one start of their processes."""
    with contextlib.ExitStack() as stack:
        before, after = (stack.enter_context(_calls(name, tree)) for tree in trees)
        pairs: list[tuple[float, float]] = []
        until = time.monotonic() + seconds
        while time.monotonic() < until or len(pairs) < FEWEST_PAIRS:
            if len(pairs) % 2:
                late = after()
                pairs.append((before(), late))
            else:
                pairs.append((before(), after()))
    medians = [statistics.median(column) for column in zip(*pairs)]
    return medians[0], medians[1], statistics.median(new / old for old, new in pairs)


@contextlib.contextmanager
def _calls(name: str, tree: Path) -> Iterator[Call]:
    """Return a call that measures a case in a checkout, and end its processes afterwards."""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    sources = [f"{tree.resolve()}/packages/{package}/src" for package in PACKAGES]
    environ |= {"PYTHONPATH": os.pathsep.join(sources), "PAIRED_TREE": str(tree.resolve())}
    if name in IMPORTS:
        yield lambda: _import_ms(IMPORTS[name], environ)
        return
    command = [sys.executable, str(HERE.with_name("paired_worker.py")), name]
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def call() -> float:
            print("go", file=process.stdin, flush=True)
            return _number(process)

        _number(process)  # it is ready, and has warmed up
        try:
            yield call
        finally:
            process.stdin.close()


def _number(process: subprocess.Popen[str]) -> float:
    """Return the next number that the process prints; other lines are skipped."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ms "):
            return float(json.loads(line[3:]))
    raise RuntimeError(f"a worker ended: {process.args!r}")


def _import_ms(code: str, environ: dict[str, str]) -> float:
    timed = f"import torch, time\nbegin = time.process_time()\n{code}\nprint(1e3 * (time.process_time() - begin))"
    with_cache = {**environ, "PYTHONPYCACHEPREFIX": f"{environ['PAIRED_TREE']}/.cache/paired"}
    done = subprocess.run([sys.executable, "-c", timed], env=with_cache, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    sys.exit(main())
