from __future__ import annotations

import gc
from collections import Counter

import pytest
import repo
from schedule import LONG, arrange, long_tests


def test_the_list_names_tests_that_exist() -> None:
    for name in long_tests(LONG.read_text()):
        path, _, rest = name.partition("::")
        assert rest.partition("[")[0] in (repo.ROOT / path).read_text(), name


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
