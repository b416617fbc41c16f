#!/usr/bin/env python3
"""Run the benchmarks behind the committed figures, each by one command.

    python3 tools/dev.py bench                     what there is: name, minutes, date of its page
    python3 tools/dev.py bench collectives exact   some of them
    python3 tools/dev.py bench --all               all that this machine can run
    python3 tools/dev.py bench exact --busy        although other processes use the cores

benches.toml has a row for each page in packages/*/bench/results: the script that measures, and its arguments.  A
script writes its page itself, or prints tables, which then replace the fenced block under the page's line
"Rerun: ...".  That line states the command, the date, the processor, versions, and how many cores other processes
used before and during the run: a run does not start while they use more than a quarter of one.  What people write on
a page that a script writes whole stands under a line `<!-- by hand -->`, and stays.

Peers that the environment lacks (DeepSpeed and others) are installed into .cache/peers, over .venv; .venv itself
stays as the constraints say.  Scripts alternate contenders and report medians; this file only starts them.
Rejected: one script that measures everything (the packages' benches also run without the repository), and figures
without their command.

Standard library only.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import devenv
import repo
import tomllib

TABLE = repo.ROOT / "tools" / "benches.toml"
PEERS = repo.ROOT / ".cache" / "peers"
MOST_CORES = 0.25  # of other processes, when a run starts
RERUN = re.compile(r"^Rerun: .*\n(?:.+\n)*", re.MULTILINE)
BY_HAND = "<!-- by hand -->"
SET_CHILD_SUBREAPER = 36  # prctl(2)
BLOCK = re.compile(r"^```\n.*?^```\n", re.MULTILINE | re.DOTALL)


class Bench(NamedTuple):
    """A page of figures and what makes them."""

    name: str
    page: Path
    commands: tuple[str, ...]  # arguments of the interpreter: a script and its options
    minutes: int  # about, on two idle cores
    prints: bool  # the figures are what the commands print; otherwise they write the page
    needs: str  # what an ordinary machine lacks, in words; then it is not part of --all

    def date(self) -> str:
        """The first date of the page."""
        found = re.search(r"20\d\d-\d\d-\d\d", self.page.read_text()) if self.page.is_file() else None
        return found.group() if found else ""


def read_table(text: str) -> tuple[dict[str, Bench], list[str]]:
    """Read benches.toml: the benches by name, and the requirements of their peers."""
    table = tomllib.loads(text)
    found = {}
    for row in table["bench"]:
        page = repo.ROOT / row["page"]
        name = row.get("name", page.stem)
        commands = (row["run"],) if isinstance(row["run"], str) else tuple(row["run"])
        found[name] = Bench(name, page, commands, row["minutes"], row.get("prints", False), row.get("needs", ""))
    return found, table["peers"]


def busy_seconds() -> float:
    """Return the processor time of all processes since the start of the machine, in seconds of one core."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # all but idle and waiting for a disk


def own_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def adopt_orphans() -> None:
    """Make this process the parent of descendants that outlive their parents, so that their time counts as ours."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def wait_for_orphans(seconds: float) -> None:
    """Wait, so long at most, for what a script leaves behind: a server of ranks ends just after it."""
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.05)
    except ChildProcessError:  # there is none left
        return


def cores_of_others(seconds: float) -> float:
    """Return how many cores other processes use now, measured for so long."""
    before, own, start = busy_seconds(), own_seconds(), time.monotonic()
    time.sleep(seconds)
    return max(0.0, (busy_seconds() - before - (own_seconds() - own)) / (time.monotonic() - start))


def peers_python(peers: Sequence[str]) -> str:
    """Make or reuse the environment of the peers over .venv; return its interpreter.

    Raises devenv.SetupError if the package index does not have them.
    """
    python, stamp = str(PEERS / "bin" / "python"), PEERS / "stamp"
    wanted = devenv.digest(devenv.setup_inputs(), " ".join(peers))
    if devenv.read_text(stamp) == wanted:
        return python
    with devenv.exclusive() as lock, devenv.step("installing the peers into .cache/peers"):
        devenv.call([sys.executable, "-m", "venv", "--clear", str(PEERS)], "make .cache/peers", lock)
        ours = next(devenv.VENV.glob("lib/python*/site-packages"))
        theirs = next(PEERS.glob("lib/python*/site-packages"))
        (theirs / "below.pth").write_text(f"import site; site.addsitedir({str(ours)!r})\n")
        pins = str(repo.ROOT / "constraints.txt")
        pip = [python, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--constraint", pins]
        devenv.call([*pip, *peers], "install the peers", lock)
        stamp.write_text(wanted)
    return python


def processor() -> str:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found.group(1) if found else platform.machine()


def rerun_lines(bench: Bench, torch: str, before: float, during: float) -> str:
    """Return the lines of a page that say how it was made."""
    return (
        f"Rerun: `python3 tools/dev.py bench {bench.name}`, which runs\n"
        + ",\n".join(f"`{command}`" for command in bench.commands)
        + f".\n{datetime.date.today()}, {os.cpu_count()} cores of {processor()}, Python {platform.python_version()}, "
        f"torch {torch};\nother processes used {before:.2f} cores before the run and {during:.2f} in it.\n"
    )


def placed(text: str, lines: str, output: str) -> str:
    """Return the page with the lines under its title, and with `output`, if there is any, as its block under them."""
    title, _, rest = text.partition("\n")
    head, found, tail = "", RERUN.search(rest), rest
    if found:
        head, tail = rest[: found.start()], rest[found.end() :]
        if output:
            tail = BLOCK.sub("", tail, count=1)
    block = f"\n```\n{output.strip()}\n```\n" if output else ""
    return f"{title}\n{head or chr(10)}{lines}{block}\n{tail.lstrip()}"


def with_hand_part(text: str, old: str) -> str:
    """Return a page that a script has written, with what stood under `BY_HAND` on the old one."""
    _, found, part = old.partition(BY_HAND)
    return text if not found or BY_HAND in text else f"{text.rstrip()}\n\n{found}{part}"


def run(bench: Bench, python: str, before: float) -> bool:
    """Run a benchmark and update its page; return whether it ended well."""
    start, busy, own = time.monotonic(), busy_seconds(), own_seconds()
    old = bench.page.read_text() if bench.page.is_file() else f"# {bench.name}\n"
    output = ""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=repo.ROOT / ".cache") as folder:
        for command in bench.commands:
            words = [word.replace("{folder}", folder) for word in command.split()]
            done = subprocess.run(
                [python, *words], cwd=repo.ROOT, env=devenv.child_environment(), text=True, check=False,
                stdout=subprocess.PIPE if bench.prints else None,
            )  # fmt: skip
            if done.returncode != 0:
                print(
                    f"bench: {command} ended with exit code {done.returncode}; its page is as before", file=sys.stderr
                )
                return False
            output += (done.stdout or "") + "\n"
    wait_for_orphans(10.0)
    seconds = time.monotonic() - start
    others = max(0.0, busy_seconds() - busy - (own_seconds() - own)) / seconds
    found = [python, "-c", "import importlib.metadata; print(importlib.metadata.version('torch'))"]
    torch = subprocess.run(found, capture_output=True, text=True, check=True).stdout.strip()
    text = old if bench.prints else with_hand_part(bench.page.read_text(), old)
    bench.page.write_text(placed(text, rerun_lines(bench, torch, before, others), output.strip()))
    print(f"bench: {bench.page.relative_to(repo.ROOT)}, {seconds / 60:.1f} minutes", flush=True)
    return True


def listing(benches: dict[str, Bench]) -> str:
    width = max(map(len, benches))
    rows = [f"{'name':{width}}  minutes  date        needs"]
    rows += [
        f"{each.name:{width}}  {each.minutes:7}  {each.date():10}  {each.needs}".rstrip() for each in benches.values()
    ]
    return "\n".join(rows)


def chosen(options: argparse.Namespace, benches: dict[str, Bench]) -> list[Bench]:
    """Return the benches of the command line.  Raises devenv.SetupError for an unknown name."""
    if options.all:
        return [each for each in benches.values() if not each.needs]
    for name in options.names:
        if name not in benches:
            raise devenv.SetupError(f"there is no bench {name!r}; choose of {', '.join(benches)}")
    return [benches[name] for name in options.names]


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="dev.py bench", description="Run the benchmarks behind the committed figures."
    )
    result.add_argument("names", nargs="*", metavar="NAME", help="benches to run; none lists them")
    result.add_argument("--all", action="store_true", help="all that need nothing special")
    result.add_argument("--busy", action="store_true", help="run although other processes use the cores")
    return result


def main(argv: list[str]) -> int:
    options = parser().parse_args(argv)
    benches, peers = read_table(TABLE.read_text())
    failed = []
    try:
        wanted = chosen(options, benches)
        if not wanted:
            print(listing(benches))
            return 0
        python = peers_python(peers)
        adopt_orphans()
        for bench in wanted:
            before = cores_of_others(3.0)
            if before > MOST_CORES and not options.busy:
                raise devenv.SetupError(
                    f"other processes use {before:.2f} cores (at most {MOST_CORES}), so the figures of {bench.name} "
                    "would be theirs too: wait until the machine is idle, or add --busy"
                )
            if not run(bench, python, before):
                failed.append(bench.name)
    except devenv.SetupError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    if failed:
        print(f"bench: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
