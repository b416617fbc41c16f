"""Traces: records, their order, and threads."""

from __future__ import annotations

import threading

import attrs
import pytest
import torch

import zcomm
from zcomm.collectives import trace
from zcomm.collectives.handles import Call, start
from zcomm.testing import run_ranks


class NoWork:
    def wait(self) -> None:
        """Nothing."""

    def is_completed(self) -> bool:
        return True


def issue(label: str, *, async_op: bool = False) -> zcomm.Handle:
    tensor = torch.zeros(2)
    return start(Call.of("all_reduce", label, 2, tensor), NoWork, (tensor,), async_op=async_op)


def test_nested_traces_all_receive_and_close_in_turn() -> None:
    with zcomm.traced([]) as outer:
        issue("a")
        with zcomm.traced([]) as inner:
            issue("b")
        issue("c")
    issue("d")
    assert [record.label for record in outer] == ["a", "b", "c"]
    assert [record.label for record in inner] == ["b"]


def test_one_sink_may_be_open_twice() -> None:
    log: list[zcomm.Record] = []
    with zcomm.traced(log):
        with zcomm.traced(log):
            issue("both")
        issue("outer only")
    assert [record.label for record in log] == ["both", "both", "outer only"]


def test_a_callable_receives_records() -> None:
    seen: list[str] = []
    with zcomm.traced(lambda record: seen.append(record.op)):
        issue("a")
    assert seen == ["all_reduce"]


def test_anything_else_is_rejected() -> None:
    # type: ignore[type-var]
    with pytest.raises(TypeError, match="a list or a callable of one Record, got dict"), zcomm.traced({}):
        pass


def test_a_collective_belongs_to_the_traces_open_at_its_issue() -> None:
    with zcomm.traced([]) as first:
        handle = issue("issued in first", async_op=True)
    with zcomm.traced([]) as second:
        handle.wait()
    assert [record.label for record in first] == ["issued in first"]
    assert second == []


def test_records_come_in_the_order_of_waits_and_the_index_is_the_order_of_issue() -> None:
    with zcomm.traced([]) as log:
        one, two = issue("one", async_op=True), issue("two", async_op=True)
        two.wait()
        one.wait()
    assert [record.label for record in log] == ["two", "one"]
    assert log[0].index > log[1].index


def test_collectives_of_other_threads_are_seen_and_none_is_lost() -> None:
    with zcomm.traced([]) as log:
        threads = [threading.Thread(target=lambda: [issue("t") for _ in range(50)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len({record.index for record in log}) == 200


def test_a_trace_ends_with_its_block_even_by_an_exception() -> None:
    with pytest.raises(KeyError), zcomm.traced([]):
        raise KeyError
    assert trace.open_sinks() == ()


def rank_traces() -> list[tuple[str, str, int, int, str, int]]:
    size = zcomm.group_size()
    with zcomm.traced([]) as log:
        zcomm.all_reduce(torch.zeros(5), label="a")
        zcomm.reduce_scatter(torch.zeros(2), torch.zeros(2 * size), label="b")
        zcomm.all_gather(torch.zeros(3 * size, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16), label="c")
        zcomm.broadcast(torch.zeros(2, 2, dtype=torch.int64))
        zcomm.barrier(label="d")
    assert all(record.ms >= record.wait_ms >= 0 for record in log)
    return [attrs.astuple(record)[:3] + attrs.astuple(record)[4:7] for record in log]


def test_a_record_has_the_larger_payload_and_the_group() -> None:
    expected = [
        ("all_reduce", "a", 20, 2, "float32", 5),
        ("reduce_scatter", "b", 16, 2, "float32", 4),
        ("all_gather", "c", 12, 2, "bfloat16", 6),
        ("broadcast", "", 32, 2, "int64", 4),
        ("barrier", "d", 0, 2, "", 0),
    ]
    assert run_ranks(rank_traces, 2) == [expected, expected]
    assert run_ranks(rank_traces, 1) == [[]]
