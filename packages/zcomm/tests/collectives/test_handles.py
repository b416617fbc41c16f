"""Handles: lifetime of tensors, times, errors."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

import zcomm
from zcomm.collectives import handles
from zcomm.collectives.handles import start
from zcomm.hangs import detector
from zcomm.hangs.fingerprint import Call


class FakeWork:
    """A Work with a wait given by the test."""

    def __init__(self, on_wait: Callable[[], None] = lambda: None) -> None:
        self.on_wait = on_wait
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        self.on_wait()

    def is_completed(self) -> bool:
        return self.waits > 0


def call_on(tensor: torch.Tensor, label: str = "x") -> Call:
    return Call.of("all_reduce", label, 2, tensor)


def test_tensors_live_until_the_wait_and_not_longer() -> None:
    tensor = torch.zeros(4)
    seen = weakref.ref(tensor)
    handle = start(call_on(tensor), FakeWork, (tensor,), async_op=True)
    del tensor
    gc.collect()
    assert seen() is not None
    handle.wait()
    gc.collect()
    assert seen() is None


def test_waiting_twice_waits_once() -> None:
    work = FakeWork()
    handle = start(call_on(torch.zeros(1)), lambda: work, (), async_op=True)
    assert not handle.is_done()
    handle.wait()
    handle.wait()
    assert work.waits == 1
    assert handle.is_done()


def test_a_synchronous_call_waits_and_returns_done() -> None:
    work = FakeWork()
    assert start(call_on(torch.zeros(1)), lambda: work, (), async_op=False) is zcomm.DONE
    assert work.waits == 1


def test_times_run_from_the_issue_and_the_wait_is_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = [100.0]
    monkeypatch.setattr(handles.time, "perf_counter", lambda: clock_s[0])

    def take(seconds: float) -> None:
        clock_s[0] += seconds

    with zcomm.traced([]) as log:
        handle = start(call_on(torch.zeros(3)), lambda: FakeWork(lambda: take(2.0)), (), async_op=True)
        take(5.0)  # the work that hides the communication
        handle.wait()
    assert [(record.ms, record.wait_ms) for record in log] == [(7000.0, 2000.0)]
    assert (log[0].nbytes, log[0].numel, log[0].dtype, log[0].group_size) == (12, 3, "float32", 2)


def test_a_stream_that_waits_leaves_an_event_on_each_side_of_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def stream_event(device: torch.device | None) -> tuple[str, ...]:
        done.append(f"event {len(done)}")
        return (done[-1],)

    monkeypatch.setattr(handles.trace, "stream_event", stream_event)
    work = FakeWork(lambda: done.append("wait"))
    start(call_on(torch.zeros(1)), lambda: work, (), async_op=False)
    assert done == ["wait"]  # no trace is open, so nothing is recorded
    with zcomm.traced([]) as log:
        start(call_on(torch.zeros(1)), lambda: work, (), async_op=False)
    assert done[1:] == ["event 1", "wait", "event 3"]
    assert log[0].stall == ("event 1", "event 3")


def test_on_a_cpu_there_is_no_stream() -> None:
    with zcomm.traced([]) as log:
        start(call_on(torch.zeros(1)), FakeWork, (), async_op=False)
    assert log[0].stall == ()


def test_a_failure_names_the_call_keeps_the_cause_and_repeats() -> None:
    def break_down() -> None:
        raise RuntimeError("Connection reset by peer\nsecond line")

    handle = start(call_on(torch.zeros(2), "g[1]"), lambda: FakeWork(break_down), (), async_op=True)
    for _ in range(2):
        with pytest.raises(
            zcomm.CollectiveFailed,
            match=r"'g\[1\]' of float32\[2\] on cpu over 2 ranks failed after .* s: Connection reset by peer \(A",
        ) as caught:
            handle.wait()
        assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_failure_is_not_recorded() -> None:
    def break_down() -> None:
        raise RuntimeError("gone")

    with zcomm.traced([]) as log, pytest.raises(zcomm.CollectiveFailed):
        start(call_on(torch.zeros(2)), lambda: FakeWork(break_down), (), async_op=False)
    assert log == []


@pytest.mark.parametrize(
    ("said", "advice"),
    [("Invalid scalar type", "view it as uint8"), ("No backend type associated with device type cpu", "NCCL groups")],
)
def test_what_the_back_end_cannot_do_is_a_value_error(said: str, advice: str) -> None:
    def reject() -> None:
        raise RuntimeError(said)

    with pytest.raises(ValueError, match=advice):
        start(call_on(torch.zeros(1)), reject, (), async_op=False)


def test_done_is_a_handle_like_any_other() -> None:
    zcomm.DONE.wait()
    assert zcomm.DONE.is_done()
    assert repr(zcomm.DONE) == "zcomm.DONE"


def test_what_comes_after_is_done_once_by_the_first_wait() -> None:
    done: list[str] = []
    message = start(call_on(torch.zeros(1)), lambda: FakeWork(lambda: done.append("arrived")), (), async_op=True)
    handle = zcomm.after(zcomm.after(message, lambda: done.append("decoded")), lambda: done.append("kept"))
    assert not handle.is_done()
    assert done == []
    handle.wait()
    handle.wait()
    assert handle.is_done()
    assert done == ["arrived", "decoded", "kept"]


def test_what_comes_after_may_be_another_message() -> None:
    done: list[str] = []

    def send(name: str) -> zcomm.Handle:
        return start(call_on(torch.zeros(1), name), lambda: FakeWork(lambda: done.append(name)), (), async_op=True)

    zcomm.after(send("first"), lambda: zcomm.after(send("second"), lambda: done.append("added"))).wait()
    assert done == ["first", "second", "added"]
    work, second = FakeWork(), FakeWork()
    chain = zcomm.after(
        start(call_on(torch.zeros(1)), lambda: work, (), async_op=True),
        lambda: start(call_on(torch.zeros(1)), lambda: second, (), async_op=True),
    )
    assert not chain.is_done()
    work.waits = 1
    assert not chain.is_done(), "the second is under way"
    second.waits = 1
    assert chain.is_done(), "a look goes on with what can go on"


def test_a_rank_chooses_when_later_phases_are_issued() -> None:
    issued: list[str] = []

    def send(name: str) -> zcomm.Handle:
        def issue() -> FakeWork:
            issued.append(name)
            return FakeWork()

        return start(call_on(torch.zeros(1), name), issue, (), async_op=True)

    handle = zcomm.after(send("first"), lambda: send("second"))
    assert issued == ["first"]
    handle.proceed()
    assert issued == ["first", "second"]
    assert not handle.is_done(), "the last phase is not waited for"
    handle.proceed()
    handle.wait()
    zcomm.DONE.proceed()
    assert issued == ["first", "second"]


class Helped(FakeWork):
    """A work that ends at the third call of `help_for`; records the requested times."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_s: list[float] = []

    def help_for(self, seconds: float) -> bool:
        self.asked_s.append(seconds)
        return len(self.asked_s) > 2


@pytest.mark.parametrize("helped", [False, True])
def test_waiting_for_a_while_ends_when_the_world_is_aborted(helped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Helped() if helped else FakeWork()
    handle = start(call_on(torch.zeros(1)), lambda: work, (), async_op=True)
    assert not handle.wait_for(0.0)
    monkeypatch.setattr(detector, "is_aborted", lambda: True)
    assert handle.wait_for(0.0)
    assert handle.wait_for(1000.0)


def test_waiting_for_ever_is_help_for_a_little_while_again_and_again() -> None:
    work = Helped()
    assert start(call_on(torch.zeros(1)), lambda: work, (), async_op=True).wait_for(float("inf"))
    assert work.asked_s == [0.1, 0.1, 0.1]


def test_waiting_for_a_while_returns_whether_it_is_over() -> None:
    assert zcomm.DONE.wait_for(0.0)
    work, after = FakeWork(), []
    handle = zcomm.after(start(call_on(torch.zeros(1)), lambda: work, (), async_op=True), lambda: after.append(1))
    assert not handle.wait_for(0.001)
    assert not after
    work.waits = 1
    assert handle.wait_for(0.001)
    assert after == [1]


@pytest.mark.parametrize(
    "error", [zcomm.CollectiveFailed("the second hop failed"), ValueError("the second hop failed")]
)
def test_a_failure_of_what_comes_after_is_raised_by_every_look(error: Exception) -> None:
    def fail() -> None:
        raise error

    handle = zcomm.after(zcomm.DONE, fail)
    for look in (handle.wait, handle.wait, handle.is_done, lambda: handle.wait_for(0.0), handle.proceed):
        with pytest.raises(type(error), match=r"^the second hop failed$"):
            look()


def test_what_comes_after_and_was_interrupted_is_not_taken_for_done() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    handle = zcomm.after(zcomm.DONE, interrupted)
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    for _ in range(2):
        with pytest.raises(zcomm.CollectiveFailed, match="the work after a collective was interrupted here"):
            handle.wait()


def test_other_threads_wait_for_what_comes_after() -> None:
    is_begun, may_end, done = threading.Event(), threading.Event(), []

    def slow() -> None:
        is_begun.set()
        may_end.wait(20)
        done.append("decoded")

    handle = zcomm.after(zcomm.DONE, slow)
    seen: list[list[str]] = []
    looks = (handle.wait, handle.is_done, lambda: handle.wait_for(0.01))
    threads = [threading.Thread(target=handle.wait)]
    threads += [threading.Thread(target=lambda look=look: (look(), seen.append(list(done)))) for look in looks]
    threads[0].start()
    assert is_begun.wait(20)
    for thread in threads[1:]:
        thread.start()
    threads[1].join(0.1)
    assert seen == []
    may_end.set()
    for thread in threads:
        thread.join()
    assert seen == [["decoded"]] * 3
