"""Abort: collectives, pending and later, and torch's own messages end with one reason on all ranks."""

from __future__ import annotations

import time
from contextlib import nullcontext
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zcomm
from zcomm import compat
from zcomm.hangs import detector
from zcomm.testing import run_ranks

REASON = "rank 1 cannot go on: it has no data"


def aborts() -> list[str]:
    """Errors on each rank; ranks wait in different ways."""
    rank, texts = dist.get_rank(), []
    zcomm.all_reduce(torch.ones(1))
    own = zcomm.consecutive_group(2, None)
    zcomm.all_reduce(torch.ones(1), own)
    zcomm.close_on_failure(own)
    assert zcomm.failure() == ""
    if rank == 1:
        time.sleep(0.3)
        zcomm.abort(REASON)
        zcomm.abort("and for another reason")
    elif rank == 0:
        with pytest.raises(RuntimeError):
            dist.recv(torch.ones(1), group=own, group_src=1)
    elif rank == 2:
        with pytest.raises(RuntimeError) as caught:
            zcomm.all_reduce(torch.ones(1))
        texts.append(str(caught.value))
    else:
        while not zcomm.failure():
            time.sleep(0.05)
    with pytest.raises(zcomm.CollectiveFailed) as caught:
        zcomm.all_reduce(torch.ones(1), label="later")
    return [zcomm.failure(), zcomm.diagnose_failure(), *texts, str(caught.value)]


def test_all_ranks_raise_the_first_reason_however_they_wait() -> None:
    for failure in run_ranks(aborts, 4):
        assert failure[0] == failure[1] == REASON
        for text in failure[2:]:
            assert REASON in text
        assert "all_reduce 'later'" in failure[-1]
        assert "not issued: this world has failed before" in failure[-1]


def aborts_with_other_groups() -> tuple[str, str, str]:
    """Return errors of waits in groups made in several ways.

    One has no named back end, two have been destroyed, and one is registered only after the abort.
    """
    groups = [dist.new_group(backend="undefined") for _ in range(4)]
    for group in groups[:3]:
        zcomm.all_reduce(torch.ones(1), group)
        zcomm.close_on_failure(group)
    for group in groups[1:3]:
        dist.destroy_process_group(group)
    if dist.get_rank() == 1:
        zcomm.abort(REASON)
    texts = [zcomm.failure()]
    for group in (groups[0], groups[3]):
        zcomm.close_on_failure(group)
        with pytest.raises(RuntimeError) as caught:
            dist.irecv(torch.ones(1), group=group, group_src=1 - dist.get_rank()).wait(timedelta(seconds=20))
        texts.append(str(caught.value))
    return texts[0], texts[1], texts[2]


def test_groups_end_however_they_were_made_and_whenever_they_are_named() -> None:
    for failure, *texts in run_ranks(aborts_with_other_groups, 2):
        assert failure in ("", REASON)
        assert not any("20000ms" in text for text in texts)


def asks() -> str:
    zcomm.all_reduce(torch.ones(1))
    zcomm.close_on_failure(None)
    if dist.get_rank() == 0:
        return zcomm.diagnose_failure()
    with pytest.raises(RuntimeError):
        dist.recv(torch.ones(1), src=0)
    return zcomm.failure()


def test_a_rank_that_diagnoses_ends_the_waits_of_the_others() -> None:
    first, second = run_ranks(asks, 2)
    assert first == second != ""


def fails_with_all(is_common: bool) -> tuple[str, float]:
    """Fail on both ranks, or on rank 1 alone; return the world's failure and the seconds of the call."""
    total = torch.ones(1)
    zcomm.all_reduce(total)
    began_s = time.monotonic()
    patient = mock.patch.multiple(detector, _COMMON_S=30.0, _LIMIT_S=40.0)  # on a busy machine ranks are apart
    with patient if is_common else nullcontext():
        for _ in range(2):  # a failure that all ranks have leaves the world as it was
            if is_common or dist.get_rank() == 1:
                zcomm.abort("rank 1 cannot go on", unless_all=True)
    took_s = time.monotonic() - began_s
    if is_common:
        zcomm.all_reduce(total)
        assert total.item() == 4
    else:
        with pytest.raises(zcomm.CollectiveFailed, match="rank 1 cannot go on"):
            zcomm.all_reduce(total)
    return zcomm.failure(), took_s


def test_a_failure_of_all_ranks_aborts_nothing_and_that_of_one_does() -> None:
    for failure, took_s in run_ranks(fails_with_all, 2, True):
        assert failure == ""
        assert took_s < 30  # no rank waits for more than the other
    for failure, took_s in run_ranks(fails_with_all, 2, False):
        assert failure == "rank 1 cannot go on"
        assert took_s < 40  # far from the time limit of the collective that the other waits in


def test_alone_an_abort_does_nothing() -> None:
    zcomm.abort(REASON)
    zcomm.close_on_failure(None)
    assert zcomm.failure() == ""
    assert zcomm.diagnose_failure() == "the other ranks could not be asked"


def aborts_what_gpus_have_in_their_queues() -> list[str]:
    """Return the names of the groups whose queues are aborted, as if NCCL carried them."""
    own, unused = (dist.new_group(backend="gloo") for _ in range(2))
    names = {id(dist.group.WORLD): "world", id(own): "own", id(unused): "unused"}
    zcomm.all_reduce(torch.ones(1))
    zcomm.all_reduce(torch.ones(1), own)
    aborted = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "backend_of", lambda group: "nccl")
        patch.setattr(dist.ProcessGroup, "abort", lambda group: aborted.append(names[id(group)]))
        if dist.get_rank() == 1:
            zcomm.abort(REASON)
        end_s = time.monotonic() + 20
        while len(aborted) < 2 and time.monotonic() < end_s:
            time.sleep(0.02)
    return sorted(aborted)


def test_an_abort_ends_what_every_group_has_in_a_gpus_queue() -> None:
    assert run_ranks(aborts_what_gpus_have_in_their_queues, 2) == [["own", "world"]] * 2
