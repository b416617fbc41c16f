import errno
import os

import pytest

from zckpt import ALONE, CheckpointCorrupt, CheckpointError, CheckpointWriteError, Peers
from zckpt.ranks import Vote
from zckpt.testing import run_threads


def test_every_rank_learns_every_result() -> None:
    def rank(peers: Peers) -> list[int]:
        return Vote(peers, "task", CheckpointWriteError).run("adding", lambda: peers.rank * 10)

    assert [each.value for each in run_threads(rank, 3)] == [[0, 10, 20]] * 3


def test_one_failure_is_every_ranks_error_with_rank_path_and_cause() -> None:
    def rank(peers: Peers) -> None:
        def work() -> None:
            if peers.rank in (1, 2):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/x")

        Vote(peers, "save of 'a'", CheckpointWriteError).run("writing", work)

    outcomes = run_threads(rank, 3)
    texts = {str(each.error) for each in outcomes}
    assert len(texts) == 1
    assert texts.pop() == (
        "save of 'a' failed while writing: rank 1: /data/x: No space left on device (ENOSPC) (also failed: rank 2)"
    )
    for each in outcomes:
        assert type(each.error) is CheckpointWriteError
        assert (each.error.rank, each.error.path) == (1, "/data/x")
    assert isinstance(outcomes[1].error.__cause__, OSError)


def test_the_class_of_a_named_error_travels() -> None:
    def rank(peers: Peers) -> None:
        def work() -> None:
            if peers.rank:
                raise CheckpointCorrupt("bad", path="p")

        Vote(peers, "load", CheckpointWriteError).run("verifying", work)

    assert [type(each.error) for each in run_threads(rank, 2)] == [CheckpointCorrupt] * 2


def test_a_lost_peer_is_a_named_error_and_not_a_hang() -> None:
    def rank(peers: Peers) -> None:
        if peers.rank == 1:
            raise SystemExit
        Vote(peers, "save of 'a'", CheckpointWriteError).run("writing", lambda: None)

    error = run_threads(rank, 2, timeout_s=10)[0].error
    assert isinstance(error, CheckpointWriteError)
    assert "rank 0 lost its peers" in str(error)


def test_an_interrupt_goes_on_as_itself_after_the_others_were_told() -> None:
    def rank(peers: Peers) -> None:
        def work() -> None:
            if peers.rank == 0:
                raise KeyboardInterrupt

        Vote(peers, "save", CheckpointWriteError).run("writing", work)

    outcomes = run_threads(rank, 2)
    assert type(outcomes[0].error) is KeyboardInterrupt
    assert isinstance(outcomes[1].error, CheckpointError)


def test_peers_that_answer_wrongly_are_noticed() -> None:
    class Two:
        rank, world_size = 0, 2

        def exchange(self, value: object) -> list[object]:
            return [value]

    with pytest.raises(CheckpointWriteError, match="1 values for a world of 2"):
        Vote(Two(), "save", CheckpointWriteError).run("planning", lambda: None)


def test_alone_is_a_world_of_one_that_still_speaks_json() -> None:
    assert ALONE.exchange({"a": (1, 2)}) == [{"a": [1, 2]}]
    with pytest.raises(TypeError):
        ALONE.exchange(object())
