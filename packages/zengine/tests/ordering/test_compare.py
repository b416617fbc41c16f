"""Comparison of launches: four rules, and who is named."""

from __future__ import annotations

from typing import Any

from zcomm import Communicator, PlayedCall
from zengine.ordering.compare import disagreements

ALL, AGAIN, PAIR = Communicator((0, 1, 2, 3), 0), Communicator((0, 1, 2, 3), 1), Communicator((0, 1), 0)
HOST = Communicator((0, 1, 2, 3), 2, True)


def call(communicator: Communicator, op: str = "allreduce", nbytes: int = 8, **more: Any) -> PlayedCall:
    return PlayedCall(
        **{
            "communicator": communicator,
            "op": op,
            "nbytes": nbytes,
            "dtype": "float32",
            "detail": "sum",
            "source": -1,
            "target": -1,
            "label": "",
            "thread": "MainThread",
            "code": call.__code__,
            "offset": 0,
            **more,
        }
    )


def test_equal_ranks_agree_in_any_number_of_groups() -> None:
    own = [call(ALL), call(PAIR), call(AGAIN), call(ALL, nbytes=16)]
    others = [call(ALL), call(AGAIN), call(ALL, nbytes=16)]
    assert not list(disagreements({0: own, 1: own, 2: others, 3: others}))


def test_a_swapped_pair_in_one_group_is_named_with_rank_position_and_lines() -> None:
    first, second = call(ALL, "allgather", 64, label="weights"), call(ALL, "allreduce", 8, label="norm")
    launches = {rank: [call(ALL), first, second] for rank in range(4)}
    launches[2] = [call(ALL), second, first]
    (found,) = disagreements(launches)
    assert (found.rule, found.ranks, found.position) == ("collectives", (0, 2), 1)
    text = str(found)
    assert "rank 0: allgather 'weights' of 64 bytes of float32" in text
    assert "rank 2: allreduce 'norm' of 8 bytes of float32" in text
    assert text.count("test_compare.py:") == 2


def test_sizes_dtypes_reductions_and_missing_operations_differ() -> None:
    whole = [call(ALL), call(ALL)]
    for wrong in (call(ALL, nbytes=4), call(ALL, dtype="int32"), call(ALL, detail="max"), call(ALL, "broadcast")):
        (found,) = disagreements({0: whole, 1: [call(ALL), wrong]})
        assert found.position == 1
    (found,) = disagreements({0: whole, 1: whole[:1]})
    assert "rank 1: launches no more" in str(found)
    assert not list(disagreements({0: whole, 1: whole[:1]}, failed=[1])), "its own error says more"
    uneven = "alltoall of unequal slices"
    assert not list(disagreements({0: [call(ALL, uneven, 4)], 1: [call(ALL, uneven, 8)]}))


def test_two_communicators_in_another_order_are_named_by_the_ranks_that_share_them() -> None:
    straight, crossed = [call(ALL), call(AGAIN)], [call(AGAIN), call(ALL)]
    (found,) = disagreements({0: straight, 1: straight, 3: crossed})
    assert (found.rule, found.ranks, found.communicators) == ("order", (0, 3), (ALL, AGAIN))
    assert not list(disagreements({0: [call(ALL), call(HOST)], 1: [call(HOST), call(ALL)]})), "Gloo has no kernels"
    (found,) = disagreements({0: [call(PAIR), call(ALL)], 1: [call(ALL), call(PAIR)], 2: [call(ALL)]})
    assert found.ranks == (0, 1), "rank 2 is no member of the pair"


def test_messages_are_received_in_the_order_of_sending() -> None:
    def ends(op: str, source: int, target: int, nbytes: int = 8) -> PlayedCall:
        return call(ALL, op, nbytes, source=source, target=target, detail="")

    sent = [ends("send", 0, 1), ends("send", 0, 1, 16)]
    assert not list(disagreements({0: sent, 1: [ends("recv", 0, 1), ends("recv", 0, 1, 16)]}))
    (found,) = disagreements({0: sent, 1: [ends("recv", 0, 1, 16), ends("recv", 0, 1)]})
    assert (found.rule, found.ranks, found.position) == ("messages", (0, 1), 0)
    assert "send from rank 0 to 1 of 8 bytes" in str(found)


def message(op: str, source: int, target: int, launch: int = 0) -> PlayedCall:
    return call(ALL, op, source=source, target=target, detail="", launch=launch)


def test_two_ranks_that_each_send_first_are_named_unless_each_launches_both_as_one() -> None:
    up, down = (0, 1), (1, 0)
    crossed = {0: [message("send", *up), message("recv", *down)], 1: [message("send", *down), message("recv", *up)]}
    (found,) = disagreements(crossed)
    assert (found.rule, found.ranks, found.communicators) == ("order", (0, 1), (ALL,))
    assert not list(disagreements({0: crossed[0], 1: crossed[1][::-1]}))
    as_one = {rank: [message(each.op, each.source, each.target, 7) for each in crossed[rank]] for rank in crossed}
    assert not list(disagreements(as_one))
    assert not list(disagreements({0: as_one[0], 1: crossed[1]})), "one of them may launch singly, in any order"
    with_sum = {rank: [*calls, call(ALL)] for rank, calls in as_one.items()}
    assert not list(disagreements(with_sum))
    (found,) = disagreements({0: with_sum[0], 1: with_sum[1][::-1]})
    assert found.rule == "order"


def test_a_ring_of_messages_is_a_circle_unless_each_rank_launches_its_two_as_one() -> None:
    def ring(launch: int) -> dict[int, list[PlayedCall]]:
        ranks = range(4)
        return {
            rank: [message("send", rank, (rank + 1) % 4, launch), message("recv", (rank - 1) % 4, rank, launch)]
            for rank in ranks
        }

    assert not list(disagreements(ring(1)))
    (found,) = disagreements(ring(0))
    assert (found.rule, found.ranks) == ("circle", (0, 1))
    assert "send from rank 0 to 1" in str(found)
    even_first = {rank: calls if rank % 2 else calls[::-1] for rank, calls in ring(0).items()}
    assert not list(disagreements(even_first))


def test_messages_and_collectives_of_two_groups_that_wait_in_a_circle_are_named() -> None:
    """Rank 0 sends before the sum of ranks 0 and 2, rank 1 receives after that of 1 and 3; 2 and 3 exchange, too."""
    left, right = Communicator((0, 2), 0), Communicator((1, 3), 0)
    launches = {
        0: [call(left), message("send", 0, 1)],
        1: [message("recv", 0, 1), call(right)],
        2: [message("recv", 3, 2), call(left)],
        3: [call(right), message("send", 3, 2)],
    }
    (found,) = disagreements(launches)
    assert found.rule == "circle"
    assert not list(disagreements({**launches, 2: launches[2][::-1]}))


def test_a_circle_of_ranks_that_share_one_group_each_is_named() -> None:
    """Ranks 0 to 3: rows (0, 1), (2, 3) and columns (0, 2), (1, 3), as of tensor and data ranks."""
    rows = {rank: call(Communicator((rank // 2 * 2, rank // 2 * 2 + 1), 0)) for rank in range(4)}
    columns = {rank: call(Communicator((rank % 2, rank % 2 + 2), 0)) for rank in range(4)}
    straight = {rank: [rows[rank], columns[rank]] for rank in range(4)}
    assert not list(disagreements(straight))
    assert list(disagreements({**straight, 3: [columns[3], rows[3]]})) is not False
    crossed = {
        rank: [rows[rank], columns[rank]] if rank in (0, 3) else [columns[rank], rows[rank]] for rank in range(4)
    }
    (found,) = disagreements(crossed)
    assert found.rule == "circle"
    assert "ranks wait for each other in a circle" in str(found)
