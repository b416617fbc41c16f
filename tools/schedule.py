"""Which tests run, in which order, and less of Python's own work around them: a plugin that conftest.py loads.

A check of every change has 20 minutes.  So it leaves out a part of the tests in `tests/weekly_tests.txt`, where many
combinations of parameters are slow.  `--weekly` runs all, as the weekly workflow does, and so does naming a file.

Several workers end together only if no long test begins last.  So `tests/long_tests.txt` lists the long ones, and the
queue of each worker begins with its part of them; the others follow in their own order, and whoever has none left
takes some of another's (pytest-xdist's `worksteal`).  Tests of one line of the list stay together, for what they
share, or because they wait more than they compute: one after the other, beside computing ones of other workers.

Collecting makes nearly a million objects that live as long as the run.  Python's collector would visit them in every
full pass, half a second each; so it pauses meanwhile and then counts them as frozen.

Rank processes are forked from a server.  It imports what is slow to import, if a collected test needs it; else each
of some hundred ranks would.

Rejected: a mark in the test, which a package's tests would need also where they are alone, without this file; times
of the last run from pytest's cache, which a clean clone has not.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import pytest

# What a collected test imports: modules that its ranks need
PRELOAD = {
    "zengine": ("zengine.build.assemble", "zengine.hybrid_engine", "torch._dynamo"),
    "transformers": ("transformers.masking_utils",),  # not modeling_utils, before which `as_deepspeed` is installed
}
LONG = Path(__file__).parents[1] / "tests" / "long_tests.txt"
WEEKLY = LONG.with_name("weekly_tests.txt")


def read_list(text: str) -> dict[str, Fraction]:
    """Read a list of tests: a line "number id" for each, where an id may be the beginning of many."""
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    return {name: Fraction(number) for number, name in lines}


def weekly_tests(names: Iterable[str], shares: Mapping[str, Fraction]) -> set[str]:
    """Return the names that a check leaves out; shares: what it keeps of the tests whose ids begin so.

    Of the combinations of a test's parameters under one line, those stay whose hashes are the smallest: a choice that
    is the same everywhere and follows no order of the parameters.  At least one stays unless the share is 0.
    """
    combinations: dict[tuple[str, str], list[str]] = {}
    for name in names:
        if lines := [line for line in shares if name.startswith(line)]:
            combinations.setdefault((max(lines, key=len), name.partition("[")[0]), []).append(name)
    return {
        name
        for (line, _), members in combinations.items()
        for name in sorted(members, key=lambda name: hashlib.sha256(name.encode()).digest())[
            math.ceil(len(members) * shares[line]) :
        ]
    }


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--weekly", action="store_true", help="run all of the tests in tests/weekly_tests.txt")


def runs_all(config: pytest.Config) -> bool:
    """Return whether `--weekly` is given, or a test or a file by its name."""
    return config.option.weekly or any("::" in name or name.endswith(".py") for name in config.args)


def pytest_report_header(config: pytest.Config) -> str:
    return f"tests/{WEEKLY.name}: {'all run' if runs_all(config) else 'a part runs (--weekly: all)'}"


def leave_out_weekly(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Remove the weekly tests."""
    if runs_all(config):
        return
    weekly = weekly_tests([item.nodeid for item in items], read_list(WEEKLY.read_text()))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in weekly])
    items[:] = [item for item in items if item.nodeid not in weekly]


def arrange(names: Sequence[str], seconds: Mapping[str, Fraction], num_workers: int) -> list[int]:
    """Return the indices of `names` in the order of the queues of all workers.

    Long tests go, the longest first, to the worker with the least; the others fill the queues to the lengths that
    `worksteal` gives them.
    """
    groups: dict[str, list[int]] = {prefix: [] for prefix in sorted(seconds, key=seconds.__getitem__, reverse=True)}
    others: list[int] = []
    for index, name in enumerate(names):
        prefix = next(filter(name.startswith, groups), None)
        (others if prefix is None else groups[prefix]).append(index)
    queues: list[list[int]] = [[] for _ in range(num_workers)]
    load = [Fraction()] * num_workers
    for prefix, members in groups.items():
        if members:
            least = load.index(min(load))
            queues[least] += members
            load[least] += seconds[prefix]
    rest, left = iter(others), len(names)
    for number, queue in enumerate(queues):
        length = left // (num_workers - number)
        queue += itertools.islice(rest, max(0, length - len(queue)))
        left -= length
    return [*itertools.chain(*queues), *rest]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out_weekly(config, items)
    num_workers = getattr(config, "workerinput", {"workercount": 1})["workercount"]
    if num_workers > 1:
        order = arrange([item.nodeid for item in items], read_list(LONG.read_text()), num_workers)
        items[:] = [items[index] for index in order]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    testing = sys.modules.get("zcomm.testing")
    for name, modules in PRELOAD.items():
        if testing is not None and name in sys.modules:
            testing.preload(*modules)
