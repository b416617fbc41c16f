"""A tally of collectives, switched on and off for the process."""

from __future__ import annotations

import logging

import pytest
import torch

import zengine.deepspeed.comm as dist
from zcomm.testing import run_ranks


def check_tally() -> tuple[object, object]:
    dist.configure(enabled=True)
    try:
        for _ in range(3):
            dist.all_reduce(torch.ones(8))
        dist.barrier()
        everything = dist.log_summary(show_straggler=True, return_dict=True)
        dist.configure({"comms_logger": {"enabled": True, "prof_ops": ["broadcast"]}})
        dist.all_reduce(torch.ones(2))
        dist.broadcast(torch.ones(4), src=0)
        return everything, dist.log_summary(return_dict=True)
    finally:
        dist.configure(enabled=False)


def test_every_rank_counts_what_it_took_part_in():
    for everything, some in run_ranks(check_tally, 2):
        assert everything["all_reduce"]["count"] == 3
        assert everything["all_reduce"]["bytes"] == 3 * 32
        assert everything["all_reduce"]["straggler_ms"] >= 0
        assert "barrier" in everything
        assert {op: row["count"] for op, row in some.items()} == {"broadcast": 1}


def test_a_summary_of_nothing_says_how_to_begin(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "zengine"):
        assert dist.log_summary() is None
    assert "configure(enabled=True) first" in caplog.text
