"""What is known of the installed torch.  These fail loudly when a new torch moves something."""

from __future__ import annotations

import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

import zcomm
from zcomm import compat
from zcomm.testing import run_ranks


def rank_times_out_after() -> float:
    group = dist.new_group(timeout=timedelta(seconds=77))
    return compat.group_timeout_s(group, torch.device("cpu"), otherwise=-1.0)


def test_the_timeout_of_a_group_can_still_be_read() -> None:
    assert run_ranks(rank_times_out_after, 1) == [77.0]


def test_without_an_answer_the_given_timeout_is_returned() -> None:
    assert compat.group_timeout_s(object(), torch.device("cpu"), otherwise=12.0) == 12.0


def rank_listens_for_warnings() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zcomm.all_gather(torch.zeros(2), torch.zeros(1))
        zcomm.reduce_scatter(torch.zeros(1), torch.zeros(2))
    return [str(warning.message) for warning in caught]


def test_the_flat_collectives_use_names_that_torch_does_not_warn_about() -> None:
    assert run_ranks(rank_listens_for_warnings, 2) == [[], []]
