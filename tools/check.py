#!/usr/bin/env python3
"""Run every check of the repository: one result line per part, and the full output of parts that fail.

    python3 tools/dev.py check [--fast] [--only types,lint] [--fix]

Each part is a command that also runs alone; `--verbose` shows the commands.  Two parts run at once, since most use
one core; the lines keep the order of the parts, and each part's seconds are those it took beside another one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import repo
from dev import PYTEST


class Part(NamedTuple):
    name: str
    command: list[str]  # arguments after the interpreter
    summary: str  # regular expression of the output line that the result quotes


QUICK_PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
FOLDERS = ["packages", "tests", "tools", "examples", "docs", "conftest.py"]
PARTS = (
    Part("format", ["-m", "ruff", "format", "--check", *FOLDERS], r"\d+ files? .*"),
    Part("lint", ["-m", "ruff", "check", *FOLDERS], r"Found .*"),
    Part("types", ["-m", "mypy", *(f"packages/{n}/src" for n in repo.PACKAGES), "tools"], r"(Found|Success).*"),
    Part(
        "architecture",
        [*QUICK_PYTEST, "tests/architecture", "--ignore=tests/architecture/test_caps.py"],
        r"\d.* in .*",
    ),
    Part("caps", [*QUICK_PYTEST, "tests/architecture/test_caps.py"], r"\d.* in .*"),
    # Half of a collection is rewriting asserts: done once, before the workers of the tests would each do it.
    Part("collect", [*QUICK_PYTEST, "--collect-only", "packages", "tests"], r"\d.* collected.*"),
    Part("doctests", [*QUICK_PYTEST, "-n", "3", "--dist", "worksteal", "tests/docs"], r"\d.* in .*"),
    # without the folders of the parts above, which `dev.py test` includes
    Part("tests", [*PYTEST, "-q", "--ignore=tests/architecture", "--ignore=tests/docs"], r"\d.* in .*"),
)
NAMES = [part.name for part in PARTS]
WITH_WEEKLY = {"doctests", "tests"}  # parts of which tests/weekly_tests.txt leaves tests out
AT_ONCE = 2  # parts: of the slow ones types, architecture and caps use one core each


class Outcome(NamedTuple):
    code: int
    output: str
    seconds: float


def run(part: Part) -> Outcome:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, *part.command], cwd=repo.ROOT, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
    )  # fmt: skip
    return Outcome(done.returncode, done.stdout, time.monotonic() - start)


def summary_line(part: Part, output: str) -> str:
    """Return the last line of `output` that matches `part.summary`, without decoration; "" if none does."""
    found = [line.strip("= ") for line in output.splitlines() if re.fullmatch(part.summary, line.strip("= "))]
    return found[-1] if found else ""


def result_line(part: Part, outcome: Outcome) -> str:
    word = "ok" if outcome.code == 0 else "FAIL"
    return f"{word:4} {outcome.seconds:6.1f} s  {summary_line(part, outcome.output)}".rstrip()


def fix() -> None:
    """Let ruff repair import order, format and old idioms."""
    subprocess.run([sys.executable, "-m", "ruff", "check", "--fix", "--quiet", *FOLDERS], cwd=repo.ROOT, check=False)
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", *FOLDERS], cwd=repo.ROOT, check=False)


def select(only: str, fast: bool, weekly: bool = False) -> list[Part]:
    """Return the parts to run; weekly: with all of the tests.  Raises ValueError for an unknown name."""
    wanted = [name.strip() for name in only.split(",") if name.strip()] or NAMES
    unknown = sorted(set(wanted) - set(NAMES))
    if unknown:
        raise ValueError(f"--only {','.join(unknown)}: no such part; choose from {', '.join(NAMES)}")
    parts = [part for part in PARTS if part.name in wanted and not (fast and part.name == "tests")]
    more = ["--weekly"] if weekly else []
    return [part._replace(command=[*part.command, *more]) if part.name in WITH_WEEKLY else part for part in parts]


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="dev.py check", description=(__doc__ or "").splitlines()[0])
    result.add_argument("--fast", action="store_true", help="all parts but the tests")
    result.add_argument("--weekly", action="store_true", help="all of the tests in tests/weekly_tests.txt")
    result.add_argument("--only", default="", metavar="NAMES", help=f"only these parts: {','.join(NAMES)}")
    result.add_argument("--fix", action="store_true", help="repair format and lint with ruff first")
    result.add_argument("--verbose", action="store_true", help="show each part's command and all output")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        parts = select(options.only, options.fast, options.weekly)
    except ValueError as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    if options.fix:
        fix()
    failed = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for part, outcome in zip(parts, pool.map(run, parts)):
            if options.verbose:
                print(f"$ python {' '.join(part.command)}")
            print(f"{part.name:13}{result_line(part, outcome)}", flush=True)
            if outcome.code:
                failed.append(part.name)
            if outcome.code or options.verbose:
                print(outcome.output.rstrip() + "\n", flush=True)
    is_whole = options.weekly or WITH_WEEKLY.isdisjoint(part.name for part in parts)
    left_out = "" if is_whole else " (--weekly runs all of the tests in tests/weekly_tests.txt)"
    print(f"check: {'FAIL: ' + ', '.join(failed) if failed else 'ok'}{left_out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
