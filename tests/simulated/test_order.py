"""The order checker: every hazard is found under every schedule, and what is ordered raises nothing."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

import pytest
import torch

from simulated_cuda.library import set_schedule, take_violations

SCHEDULES = ("early", "late", "random:7")


@pytest.fixture(params=SCHEDULES)
def schedule(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    set_schedule(name)
    return name


def violations_of(work: Callable[[], object]) -> str:
    """Return the violations of `work`, whether or not it raised them."""
    with contextlib.suppress(RuntimeError):  # kept among the violations as well
        work()
    torch.cuda.synchronize()
    return "\n".join(take_violations())


@pytest.mark.usefixtures("schedule")
def test_a_read_on_another_stream_needs_a_wait() -> None:
    values, side = torch.ones(64, device="cuda"), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def read(waits: bool) -> None:
        values.add_(1)
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            values.sum()
        torch.cuda.synchronize()

    assert "reads memory that aten::add on the default stream writes" in violations_of(lambda: read(False))
    assert violations_of(lambda: read(True)) == ""


@pytest.mark.usefixtures("schedule")
def test_a_write_needs_a_wait_for_earlier_reads() -> None:
    values, side = torch.ones(64, device="cuda"), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()

    def write(waits: bool) -> None:
        with torch.cuda.stream(side):
            total = values * 2
        if waits:
            torch.cuda.current_stream().wait_event(side.record_event())
        values.zero_()
        torch.cuda.synchronize()
        del total

    assert "zero_ on the default stream writes memory that aten::mul" in violations_of(lambda: write(False))
    assert violations_of(lambda: write(True)) == ""


@pytest.mark.usefixtures("schedule")
def test_two_streams_may_read_and_may_write_different_halves() -> None:
    values, side = torch.ones(64, device="cuda"), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()

    def work() -> None:
        values[:32].add_(1)
        with torch.cuda.stream(side):
            values[32:].mul_(3)
        torch.cuda.synchronize()
        values.sum()
        with torch.cuda.stream(side):
            values.sum()
        torch.cuda.synchronize()

    assert violations_of(work) == ""
    assert values.cpu().eq(torch.tensor([2.0, 3.0]).repeat_interleave(32)).all()


@pytest.mark.usefixtures("schedule")
def test_an_event_orders_what_is_before_its_record_only() -> None:
    values, side = torch.ones(64, device="cuda"), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def work() -> None:
        event = torch.cuda.current_stream().record_event()
        values.add_(1)
        side.wait_event(event)
        with torch.cuda.stream(side):
            values.sum()
        torch.cuda.synchronize()

    assert "nothing orders the two" in violations_of(work)


@pytest.mark.usefixtures("schedule")
def test_memory_that_another_stream_uses_is_freed_with_record_stream() -> None:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def free(records: bool) -> None:
        values = torch.ones(4096, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            values.mul_(2)
        if records:
            values.record_stream(side)
        del values
        torch.empty(8, device="cuda")  # any allocation could be given the memory
        torch.cuda.synchronize()

    assert "call record_stream" in violations_of(lambda: free(False))
    assert violations_of(lambda: free(True)) == ""


def test_recorded_memory_is_reused_after_the_stream_is_done() -> None:
    set_schedule("late")
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    values = torch.ones(100_003, device="cuda")
    address = values.data_ptr()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        values.mul_(2)
    values.record_stream(side)
    del values
    second = torch.empty(100_003, device="cuda")
    assert second.data_ptr() != address
    torch.cuda.synchronize()
    assert torch.empty(100_003, device="cuda").data_ptr() == address


@pytest.mark.usefixtures("schedule")
def test_memory_made_on_one_stream_is_not_another_streams_without_a_wait() -> None:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def fill() -> None:
        values = torch.empty(128, device="cuda")  # its former owner may still be at work
        with torch.cuda.stream(side):
            values.zero_()
        torch.cuda.synchronize()

    assert "an allocation on the default stream writes" in violations_of(fill)


@pytest.mark.usefixtures("schedule")
def test_the_host_reads_pinned_memory_after_the_event() -> None:
    values = torch.arange(64.0, device="cuda")
    torch.cuda.synchronize()

    def read(waits: bool) -> None:
        host = torch.empty(64, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.current_stream().record_event()
        if waits:
            event.synchronize()
            assert host.sum().item() == 2016
        else:
            host.sum()
        torch.cuda.synchronize()

    assert "aten::sum on the host reads memory that copy_ to the host" in violations_of(lambda: read(False))
    assert violations_of(lambda: read(True)) == ""


@pytest.mark.usefixtures("schedule")
def test_the_host_writes_pinned_memory_after_the_copy_from_it() -> None:
    target = torch.zeros(64, device="cuda")

    def write(waits: bool) -> None:
        host = torch.ones(64, pin_memory=True)
        target.copy_(host, non_blocking=True)
        if waits:
            torch.cuda.current_stream().synchronize()
        host.fill_(5)
        torch.cuda.synchronize()

    assert "aten::fill_ on the host writes memory" in violations_of(lambda: write(False))
    assert violations_of(lambda: write(True)) == ""
    assert target.cpu().eq(1).all()


def test_the_checker_sees_what_numpy_reads() -> None:
    set_schedule("late")
    host = torch.zeros(64, pin_memory=True)

    def read() -> None:
        host.copy_(torch.ones(64, device="cuda"), non_blocking=True)
        host.numpy()

    assert "numpy" in violations_of(read)


def test_late_work_is_late_and_freed_memory_is_poisoned() -> None:
    """The schedules by themselves show a missing wait as wrong bits."""
    set_schedule("late")
    host = torch.zeros(64, pin_memory=True)
    host.copy_(torch.ones(64, device="cuda"), non_blocking=True)
    behind_the_checkers_back = (ctypes.c_float * 64).from_address(host.data_ptr())
    assert set(behind_the_checkers_back) == {0.0}, "the copy is not due"
    torch.cuda.synchronize()
    assert set(behind_the_checkers_back) == {1.0}
    assert torch.empty(64, device="cuda").isnan().all()


@pytest.mark.usefixtures("schedule")
def test_work_that_a_graph_forks_must_be_joined() -> None:
    values, side = torch.zeros(64, device="cuda"), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()

    def capture(joins: bool) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                values.add_(1)
            if joins:
                torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()

    assert "nothing joined" in violations_of(lambda: capture(False))
    assert violations_of(lambda: capture(True)) == ""
