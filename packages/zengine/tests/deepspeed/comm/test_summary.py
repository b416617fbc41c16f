"""A tally of collectives, switched on and off for the process."""

from __future__ import annotations

import gc

import pytest
import torch

import zengine.deepspeed.comm as dist
from zcomm.testing import run_ranks


def check_tally() -> tuple[object, object, object]:
    dist.configure(enabled=True)
    try:
        for _ in range(3):
            dist.all_reduce(torch.ones(8))
        everything = dist.log_summary(show_straggler=True, return_dict=True)
        dist.configure({"comms_logger": {"enabled": True, "prof_ops": ["broadcast"]}})
        gc.collect()
        dist.all_reduce(torch.ones(2))
        dist.broadcast(torch.ones(4), src=0)
        some = dist.log_summary(return_dict=True)
    finally:
        dist.configure(enabled=False)
        gc.collect()
    return everything, some, dist.log_summary(return_dict=True)


def test_every_rank_counts_what_it_took_part_in():
    for everything, some, after in run_ranks(check_tally, 2):
        assert everything["all_reduce"][32]["count"] == 3
        assert set(everything["stragglers"]) == {0, 1}
        assert {op: figures[16]["count"] for op, figures in some.items()} == {"broadcast": 1}
        assert after == {}


def test_a_summary_of_nothing_says_so(capsys: pytest.CaptureFixture[str]):
    gc.collect()
    assert dist.log_summary() == {}
    assert "not counted" in capsys.readouterr().out
