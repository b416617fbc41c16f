"""Jobs of the ranks, and the wait for the others when one has failed."""

from __future__ import annotations

import pickle
import time

import pytest
import torch.distributed as dist

from zcomm.testing import RankFailed, run_ranks
from zcomm.testing import task as task_module
from zcomm.testing.reference import FunctionRef
from zcomm.testing.task import RunRequest

TASK = RunRequest(FunctionRef("/x.py", "x", "fn"), 4, pickle.dumps(((), {})), 5.0)


def test_each_rank_is_sent_its_own_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of the launcher that runs the tests")
    jobs = [TASK.for_rank(rank, "/store") for rank in range(4)]
    assert [(job.rank, job.environ["RANK"], job.environ["WORLD_SIZE"]) for job in jobs] == [
        (rank, str(rank), "4") for rank in range(4)
    ]
    assert "TORCHELASTIC_RUN_ID" not in jobs[0].environ


def test_a_chosen_network_interface_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "chosen")
    assert TASK.for_rank(0, "/store").environ["GLOO_SOCKET_IFNAME"] == "chosen"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert TASK.for_rank(0, "/store").environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")


def sleeping_for_ever() -> None:
    while True:
        time.sleep(0.05)


def rank_one_fails_while_zero_computes() -> None:
    if dist.get_rank() == 1:
        raise ValueError("early")
    sleeping_for_ever()


def test_a_rank_that_goes_on_after_a_failure_is_shown_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_module, "_GRACE_S", 0.2)
    with pytest.raises(RankFailed, match=r"rank 1 raised ValueError(.|\n)*rank 0 was still running(.|\n)*for_ever"):
        run_ranks(rank_one_fails_while_zero_computes, 2)
