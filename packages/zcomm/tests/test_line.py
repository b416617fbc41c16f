"""The line between ranks: two ends over one store in memory, in one process."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from zcomm import line
from zcomm.line import Line
from zcomm.report import Answer, Report

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEPER) as process:
        yield process
        process.kill()


def told(rank: int) -> Report:
    return Report(rank=rank, world_size=2, context=f"I am {rank}")


def test_the_first_to_call_decides_and_all_see_the_call(store: dist.Store) -> None:
    first, second = Line.to(store, 0, 2), Line.to(store, 1, 2)
    assert not second.is_called()
    assert first.call()
    assert second.is_called()
    assert not second.call()


def test_reports_and_the_verdict_arrive(store: dist.Store) -> None:
    ends = [Line.to(store, rank, 2) for rank in range(2)]
    for end in ends:
        end.publish(told(end.rank))
    assert ends[0].collect(5.0) == {0: told(0), 1: told(1)}
    ends[0].settle("it was rank 1")
    assert ends[1].verdict(5.0) == "it was rank 1"


def test_rank_0_stays_until_all_who_told_have_heard(store: dist.Store) -> None:
    ends = [Line.to(store, rank, 2) for rank in range(2)]
    for end in ends:
        end.publish(told(end.rank))
    ends[0].settle("it was rank 1")
    staying = threading.Thread(target=ends[0].linger, args=(60.0,))
    staying.start()
    staying.join(0.2)
    assert staying.is_alive()
    ends[1].verdict(5.0)
    staying.join(30.0)
    assert not staying.is_alive()
    ends[1].linger(60.0)  # only rank 0 stays


def test_a_verdict_that_does_not_come_is_empty(store: dist.Store) -> None:
    assert Line.to(store, 0, 2).verdict(0.0) == ""


def test_a_rank_that_does_not_answer_is_told_from_one_that_never_came(store: dist.Store) -> None:
    asking, _ = Line.to(store, 0, 3), Line.to(store, 1, 3)
    asking.publish(told(0))
    found = asking.collect(0.0)
    assert [found[rank].answer for rank in range(3)] == [Answer.TOLD, Answer.SILENT, Answer.SILENT]
    assert found[1].note.startswith("process ")
    assert found[2].note == "it has issued no collective"


def test_a_process_that_ended_is_not_waited_for(store: dist.Store, sleeper: subprocess.Popen[bytes]) -> None:
    asking, other = Line.to(store, 0, 2), Line.to(store, 1, 2)
    asking.publish(told(0))
    presence = line._presence() | {"pid": sleeper.pid, "started": line._started(sleeper.pid)}
    other.store.set(other._key("here/1"), json.dumps(presence))
    assert not line._is_gone(presence)
    sleeper.kill()
    found = asking.collect(60.0)  # the test's own limit is shorter
    assert (found[1].answer, found[1].note) == (Answer.GONE, f"process {sleeper.pid} of this host")


def test_a_process_of_another_host_or_another_life_is_judged_by_what_can_be_known() -> None:
    mine = line._presence()
    assert not line._is_gone(mine)
    assert not line._is_gone(mine | {"host": "elsewhere", "started": "0"}), "it cannot be seen from here"
    assert line._is_gone(mine | {"started": "1"}), "the number belongs to a later process"


def test_a_store_that_outlives_a_world_does_not_mix_the_calls_of_two(store: dist.Store) -> None:
    earlier = [Line.to(store, rank, 2) for rank in range(2)]
    earlier[0].call()
    earlier[0].settle("old")
    later = [Line.to(store, rank, 2) for rank in range(2)]
    assert not later[1].is_called()
    assert later[0].call()
    assert later[1].verdict(0.0) == ""
