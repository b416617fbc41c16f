"""The side channel between ranks: two ends over one store in memory, in one process."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from zcomm.hangs.report import Answer, Report
from zcomm.hangs.side_channel import SideChannel
from zcomm.hosts import has_ended, process_identity, start_time

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEPER) as process:
        yield process
        process.kill()


def report_of(rank: int) -> Report:
    return Report(rank=rank, world_size=2, context=f"I am {rank}")


def test_the_first_to_call_decides_and_all_see_the_call(store: dist.Store) -> None:
    first, second = SideChannel.open(store, 0, 2), SideChannel.open(store, 1, 2)
    assert not second.is_requested()
    assert first.request_reports()
    assert second.is_requested()
    assert not second.request_reports()


def test_reports_and_the_diagnosis_arrive(store: dist.Store) -> None:
    ends = [SideChannel.open(store, rank, 2) for rank in range(2)]
    for end in ends:
        end.publish(report_of(end.rank))
    assert ends[0].collect(5.0) == {0: report_of(0), 1: report_of(1)}
    ends[0].publish_diagnosis("it was rank 1")
    assert ends[1].await_diagnosis(5.0) == "it was rank 1"


def test_rank_0_stays_until_all_ranks_that_reported_have_the_diagnosis(store: dist.Store) -> None:
    ends = [SideChannel.open(store, rank, 2) for rank in range(2)]
    for end in ends:
        end.publish(report_of(end.rank))
    ends[0].publish_diagnosis("it was rank 1")
    staying = threading.Thread(target=ends[0].drain, args=(60.0,))
    staying.start()
    staying.join(0.2)
    assert staying.is_alive()
    ends[1].await_diagnosis(5.0)
    staying.join(30.0)
    assert not staying.is_alive()
    ends[1].drain(60.0)  # only rank 0 stays


def test_a_diagnosis_that_does_not_come_is_empty(store: dist.Store) -> None:
    assert SideChannel.open(store, 0, 2).await_diagnosis(0.0) == ""


def test_a_rank_that_does_not_answer_differs_from_one_that_never_came(store: dist.Store) -> None:
    asking, _ = SideChannel.open(store, 0, 3), SideChannel.open(store, 1, 3)
    asking.publish(report_of(0))
    found = asking.collect(0.0)
    assert [found[rank].answer for rank in range(3)] == [Answer.REPORTED, Answer.SILENT, Answer.SILENT]
    assert found[1].note.startswith("process ")
    assert found[2].note == "it has issued no collective"


def test_a_process_that_ended_is_not_waited_for(store: dist.Store, sleeper: subprocess.Popen[bytes]) -> None:
    asking, other = SideChannel.open(store, 0, 2), SideChannel.open(store, 1, 2)
    asking.publish(report_of(0))
    identity = process_identity() | {"pid": sleeper.pid, "started": start_time(sleeper.pid)}
    other.store.set(other._key("here/1"), json.dumps(identity))
    assert not has_ended(identity)
    sleeper.kill()
    found = asking.collect(60.0)  # the test's own limit is shorter
    assert (found[1].answer, found[1].note) == (Answer.GONE, f"process {sleeper.pid} of this host")


def test_a_store_that_outlives_a_world_does_not_mix_the_calls_of_two(store: dist.Store) -> None:
    earlier = [SideChannel.open(store, rank, 2) for rank in range(2)]
    earlier[0].request_reports()
    earlier[0].publish_diagnosis("old")
    later = [SideChannel.open(store, rank, 2) for rank in range(2)]
    assert not later[1].is_requested()
    assert later[0].request_reports()
    assert later[1].await_diagnosis(0.0) == ""
