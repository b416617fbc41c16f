from __future__ import annotations

import gc
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import repo
from schedule import LONG, WEEKLY, arrange, leave_out_weekly, read_list, weekly_tests


def test_the_lists_name_tests_that_exist() -> None:
    for name in [*read_list(LONG.read_text()), *read_list(WEEKLY.read_text())]:
        path, _, rest = name.partition("::")
        assert rest.partition("[")[0] in (repo.ROOT / path).read_text(), name


@pytest.mark.parametrize(
    ("option", "arguments", "is_run"),
    [
        (False, ["packages", "tests"], False),
        (False, ["tests/contract"], False),
        (True, ["packages", "tests"], True),
        (False, ["tests/contract/test_table.py"], True),
        (False, ["tests/a.py::test_b[1]"], True),
    ],
)
def test_weekly_tests_run_with_the_option_or_by_name(option: bool, arguments: list[str], is_run: bool) -> None:
    gone: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: gone.extend(items))
    config: Any = SimpleNamespace(option=SimpleNamespace(weekly=option), args=arguments, hook=hook)
    shares = read_list(WEEKLY.read_text())
    weekly = SimpleNamespace(nodeid=next(name for name, share in shares.items() if not share) + "-x]")
    items: Any = [SimpleNamespace(nodeid="tests/always.py::test"), weekly]
    leave_out_weekly(config, items)
    assert (weekly in items, weekly in gone) == (is_run, not is_run)
    assert len(items) == 1 + is_run


def test_a_share_of_each_tests_combinations_stays_and_the_longest_line_counts() -> None:
    names = [f"a.py::{test}[{number}]" for test in ("x", "y") for number in range(10)] + ["a.py::z", "b.py::x[1]"]
    assert weekly_tests(names, read_list("0 b.py")) == {"b.py::x[1]"}
    left_out = weekly_tests(names, read_list("1/3 a.py\n# all\n1 a.py::x[3"))
    assert [sum(name.startswith(f"a.py::{test}") for name in left_out) for test in "xyz"] == [6, 6, 0]
    assert "a.py::x[3]" not in left_out
    assert left_out == weekly_tests(names[::-1], read_list("1/3 a.py\n1 a.py::x[3"))


def test_long_tests_begin_the_queues_and_every_test_runs_once() -> None:
    names = [f"a::{number}" for number in range(8)] + ["b::x[1]", "b::x[2]", "c::1", "d::1"]
    order = arrange(names, {"b::x": 50.0, "c::1": 30.0, "d": 30.0, "gone": 90.0}, num_workers=3)
    assert sorted(order) == list(range(12))
    queues = [[names[index] for index in order[at : at + 4]] for at in (0, 4, 8)]
    assert queues[0][:2] == ["b::x[1]", "b::x[2]"]  # tests of one line stay together
    assert [queue[0] for queue in queues[1:]] == ["c::1", "d::1"]
    assert [name for queue in queues for name in queue if name.startswith("a")] == names[:8]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("num_tests", [0, 1, 7, 10])
def test_a_queue_has_the_length_that_worksteal_gives_it(num_tests: int, num_workers: int) -> None:
    names = [f"t{number}" for number in range(num_tests)]
    seconds = dict.fromkeys(names[-num_workers:], 10.0)
    order = arrange(names, seconds, num_workers)
    assert Counter(order) == Counter(range(num_tests))
    starts, left = [], num_tests
    for number in range(num_workers):
        starts.append(num_tests - left)
        left -= left // (num_workers - number)
    if num_tests > num_workers:
        assert {names[order[start]] for start in starts} == set(seconds)


def test_collected_tests_are_not_visited_by_the_collector() -> None:
    assert gc.isenabled()
    assert gc.get_freeze_count() > 1000
