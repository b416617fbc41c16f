"""Statistics of collectives, switched on and off for the process, with DeepSpeed's shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zengine.deepspeed.comm as dist
from zcomm.testing import run_ranks
from zengine.deepspeed.comm.config import DeepSpeedCommsConfig
from zengine.deepspeed.utils.comms_logging import CommsLogger, calc_bw_log, convert_size


def check_records() -> tuple[Any, ...]:
    dist.configure(enabled=True, prof_all=True)
    try:
        ones = torch.ones(8)
        for _ in range(3):
            dist.all_reduce(ones)
        dist.all_gather_into_tensor(torch.empty(16), ones)
        dist.reduce(ones, 0)  # torch.distributed's own
        everything = dist.log_summary(show_straggler=True, return_dict=True)
        names, count = dist.get_logged_comm_ops(), dist.get_comm_operation_count()
        dist.reset_log()
        assert not dist.has_comm_data()
        dist.configure({"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["broadcast"]}})
        dist.all_reduce(torch.ones(2))
        dist.gather(ones, None if dist.get_rank() else [ones.clone(), ones.clone()])
        dist.broadcast(torch.ones(4), src=0)
        some = dist.log_summary(return_dict=True)
    finally:
        dist.configure(enabled=False)
        dist.reset_log()
    return everything, names, count, some


def test_every_rank_counts_what_it_took_part_in():
    for rank, (everything, names, count, some) in enumerate(run_ranks(check_records, 2)):
        sizes = {
            op: {size: figures["count"] for size, figures in by.items()} for op, by in everything["summary"].items()
        }
        assert sizes["all_reduce"] == {32: 3}
        assert sizes["all_gather_into_tensor"] == {32: 1}
        assert sizes["reduce"] == {32: 1}
        assert {"all_reduce", "all_gather_into_tensor", "reduce"} <= set(names)
        assert count >= 5
        figures = everything["summary"]["all_reduce"][32]
        assert figures["msg_size_str"] == "32.0 B"
        assert figures["total_latency_ms"] > 0 < figures["busbw_avg_gbps"]
        assert everything["straggler_analysis"]["all_reduce"][32]["total_straggler_ms"] >= 0
        assert (everything["metadata"]["rank"], everything["metadata"]["world_size"]) == (rank, 2)
        assert {op: by[16]["count"] for op, by in some["summary"].items()} == {"broadcast": 1}
        assert some["straggler_analysis"] is None


def check_own_operation() -> tuple[Any, ...]:
    @dist.timed_op
    def send(tensor: torch.Tensor, prof: bool = False, log_name: str = "mine") -> int:
        return tensor.numel()

    calls = [send(torch.ones(3))]
    dist.configure(enabled=True, prof_all=False, prof_ops=[])
    calls += [send(torch.ones(3)), send(torch.ones(4), prof=True)]
    dist.configure(enabled=False)
    found = dist.log_summary(return_dict=True)
    dist.reset_log()
    return calls, {size: by["count"] for size, by in (found or {})["summary"]["mine"].items()}


def test_a_script_s_own_operation_is_timed_if_it_asks():
    assert run_ranks(check_own_operation, 1) == [([3, 3, 4], {16: 1})]


def test_figures_are_deepspeeds(monkeypatch: pytest.MonkeyPatch):
    """Values of DeepSpeed 0.19.8 on one rank."""
    assert [convert_size(size) for size in (0, 5, 1536, 3 << 20)] == ["0B", "5.0 B", "1.5 KB", "3.0 MB"]
    monkeypatch.setattr("zengine.deepspeed.utils.comms_logging.get_world_size", lambda: 4)
    assert calc_bw_log("all_reduce", 1e6, 2.0) == (8.0, 6.0)
    assert calc_bw_log("all_gather", 1e6, 2.0) == (16.0, 12.0)
    assert calc_bw_log("all_to_all", 1e6, 2.0) == (4.0, 3.0)
    assert calc_bw_log("broadcast", 1e6, 2.0) == (4.0, 4.0)
    with pytest.raises(ValueError, match=r"calc_bw_log\('fly'\): not a communication; choose one of all_gather"):
        calc_bw_log("fly", 1, 1)


def test_a_logger_takes_the_section_of_a_config(capsys: pytest.CaptureFixture[str]):
    log = CommsLogger()
    log.configure(DeepSpeedCommsConfig({}))
    assert not log.enabled
    log.configure(DeepSpeedCommsConfig({"comms_logger": {"enabled": True, "prof_ops": ["reduce"]}}))
    log.start_profiling_op(["send"])
    log.stop_profiling_op(["reduce"])
    assert log.prof_ops == ["send"]
    for ms in (2.0, 4.0):
        log.append("send", "send", ms, 2048)
    assert log.log_all() is None
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == "send"
    assert printed[2].split() == ["2.0", "KB", "2", "6.00", "3.00", "0.01", "0.01"]
