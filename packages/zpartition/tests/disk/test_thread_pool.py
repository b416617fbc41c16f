from __future__ import annotations

import threading

import pytest

from zpartition.disk.transfer_queue import ThreadPool


def test_calls_run_in_order_and_tell_what_they_raised() -> None:
    ended, seen = threading.Event(), []
    pool = ThreadPool.start(1, ended.set)
    for number in range(5):
        pool.put(lambda number=number: seen.append(number))
    results = pool.run_all([lambda: seen.append(5), lambda: 1 // 0, lambda: seen.append(6)])
    assert seen == [0, 1, 2, 3, 4, 5, 6]
    assert [type(result) for result in results] == [type(None), ZeroDivisionError, type(None)]
    assert pool.run_all([]) == []
    pool.stop()
    assert ended.is_set()
    assert not any(thread.is_alive() for thread in pool.threads)


def test_several_threads_work_at_once() -> None:
    pool, meet = ThreadPool.start(3, lambda: None), threading.Barrier(3)
    assert pool.run_all([lambda: meet.wait(30) and None] * 3) == [None] * 3
    pool.stop()


def test_one_of_the_threads_may_stop_them_and_what_it_puts_afterwards_is_done() -> None:
    ended, seen = threading.Event(), []

    def job() -> None:
        pool.stop()
        pool.put(lambda: seen.append(1))

    pool = ThreadPool.start(2, ended.set)
    pool.put(job)
    assert ended.wait(30)
    assert seen == [1]


def test_a_system_without_threads_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before, start, budget = threading.active_count(), threading.Thread.start, iter([1, 1])

    def limited(thread: threading.Thread) -> None:
        if next(budget, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        ThreadPool.start(3, lambda: pytest.fail("not ours to end"))
    for thread in threading.enumerate():
        if "zpartition-disk" in thread.name:
            thread.join()
    assert threading.active_count() == before
