import itertools
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from zckpt.storage.thread_pool import run_jobs


@pytest.mark.parametrize("num_threads", [0, 1, 2, 7])
def test_results_come_in_the_order_of_the_jobs(num_threads: int) -> None:
    assert run_jobs([partial(pow, n, 2) for n in range(50)], num_threads) == [n * n for n in range(50)]
    assert run_jobs([], num_threads) == []


def test_one_job_and_one_thread_run_where_the_caller_is() -> None:
    here = threading.get_ident()
    assert run_jobs([threading.get_ident], 8) == [here]
    assert run_jobs([threading.get_ident] * 3, 1) == [here] * 3


def test_two_jobs_run_at_once_and_no_thread_is_left() -> None:
    before = threading.active_count()
    barrier = threading.Barrier(2, timeout=300)
    run_jobs([barrier.wait, barrier.wait], 2)  # alone, the first would wait for ever
    assert threading.active_count() == before


def test_after_an_error_no_job_begins_and_the_earliest_error_is_raised() -> None:
    begun: list[int] = []
    barrier = threading.Barrier(2, timeout=300)

    def fail(number: int) -> None:
        begun.append(number)
        barrier.wait()
        raise ValueError(f"job {number}")

    with pytest.raises(ValueError, match="job 0"):
        run_jobs((partial(fail, n) for n in range(100)), 2)
    assert sorted(begun) == [0, 1]


def test_jobs_are_made_when_they_are_needed() -> None:
    made: list[int] = []

    def jobs() -> Iterator[partial[int]]:
        for number in range(20):
            made.append(number)
            yield partial(len, made)

    counts = run_jobs(jobs(), 1)
    assert counts[5] <= 7
    assert made == list(range(20))


def test_an_interrupt_while_the_caller_waits_ends_the_others_first(monkeypatch: pytest.MonkeyPatch) -> None:
    join, release = threading.Thread.join, threading.Event()

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if not release.is_set():
            release.set()
            raise KeyboardInterrupt
        join(thread, timeout)

    def job(number: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert release.wait(30)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    barrier = threading.Barrier(2, timeout=300)
    with pytest.raises(KeyboardInterrupt):
        run_jobs([barrier.wait, barrier.wait, partial(job, 0), partial(job, 1)], 2)
    assert not [each for each in threading.enumerate() if each.name == "zckpt-pool"]


def test_a_job_that_cannot_be_made_is_an_error_in_whichever_thread() -> None:
    caller = threading.current_thread()

    def jobs() -> Iterator[partial[None]]:
        while threading.current_thread() is caller:
            yield partial(time.sleep, 0.001)
        raise MemoryError("no room for the next job")

    with pytest.raises(MemoryError, match="no room for the next job"):
        run_jobs(jobs(), 2)
    assert not [each for each in threading.enumerate() if each.name == "zckpt-pool"]


def test_threads_that_the_system_does_not_have_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, itertools.count()

    def limited(thread: threading.Thread) -> None:
        if next(started):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    assert run_jobs([partial(pow, n, 2) for n in range(50)], 5) == [n * n for n in range(50)]
    assert not [each for each in threading.enumerate() if each.name == "zckpt-pool"]
