import threading

import pytest

from zckpt import Peers
from zckpt.testing import run_threads


def test_values_come_in_rank_order_exchange_after_exchange() -> None:
    def rank(peers: Peers) -> list[list[int]]:
        return [peers.exchange(peers.rank + 10 * i) for i in range(50)]

    expected = [[10 * i + rank for rank in range(4)] for i in range(50)]
    assert [outcome.value for outcome in run_threads(rank, 4)] == [expected] * 4


@pytest.mark.parametrize("end", ["raise", "return"])
def test_a_rank_that_ends_early_is_an_error_for_those_that_wait(end: str) -> None:
    def rank(peers: Peers) -> None:
        peers.exchange(None)
        if peers.rank == 1:
            if end == "raise":
                raise KeyError("mine")
            return
        peers.exchange(None)

    outcomes = run_threads(rank, 3)
    assert [type(outcome.error) for outcome in outcomes] == [
        ConnectionError,
        KeyError if end == "raise" else type(None),
        ConnectionError,
    ]
    assert "rank [1] did not come to exchange 2" in str(outcomes[0].error)


def test_a_rank_that_hangs_is_told_and_not_waited_for_for_ever() -> None:
    never = threading.Event()

    def rank(peers: Peers) -> None:
        if peers.rank == 1:
            never.wait(20)
        peers.exchange(None)

    outcomes = run_threads(rank, 2, timeout_s=0.2)
    assert isinstance(outcomes[0].error, (ConnectionError, TimeoutError))
    assert isinstance(outcomes[1].error, TimeoutError)
    never.set()
