"""deepspeed.utils' small modules: timers, NUMA, versions, ranges, loggers, names of an mpu."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zengine.deepspeed.utils import (
    bwc,
    debug,
    instrument_w_nvtx,
    log_dist_once,
    module_utils,
    numa,
    set_log_level_from_string,
    timer,
)
from zengine.deepspeed.utils import logging as ds_logging
from zengine.deepspeed.utils.config import get_timers_config
from zengine.deepspeed.utils.torch import is_functorch_transforming, register_grad_hook, required_torch_version
from zengine.deepspeed.utils.types import GATED_ACTIVATION_TYPES, ActivationFuncType, NormType
from zengine.deepspeed.utils.zero_to_fp32 import get_model_state_file, get_model_state_files, get_optim_files


def test_timers_add_up_and_print(capsys: pytest.CaptureFixture[str]):
    timers = timer.SynchronizedWallClockTimer()
    for _ in range(2):
        timers(timer.FORWARD_GLOBAL_TIMER).start()
        time.sleep(0.002)
        timers("fwd").stop(record=True)
    assert timers("fwd").elapsed(reset=False) >= 4
    assert timers("fwd").mean() >= 2
    assert timers.get_mean(["fwd", "none"])["fwd"] >= 2000
    with pytest.raises(AssertionError, match="timer is not started"):
        timers("fwd").stop()
    timers("fwd").start()
    with pytest.raises(AssertionError, match="fwd timer has already been started"):
        timers("fwd").start()
    before_s = time.monotonic()
    timers.log(["fwd", "none"])
    assert capsys.readouterr().out.partition("] ")[2].startswith("time (ms) | fwd: ")
    assert timers("fwd").started_  # a running interval goes on, from 0
    assert timers("fwd").elapsed() <= (time.monotonic() - before_s) * 1000 + 1
    assert timers.memory_usage().count("GB") == 4
    assert list(timers.get_timers()) == ["fwd"]


def test_a_mean_leaves_out_the_extremes():
    """Values of DeepSpeed 0.19.8."""
    assert timer.trim_mean([1, 2, 3, 100, -50, 4, 5, 6, 7, 8], 0.1) == 4.5
    assert timer.trim_mean([], 0.1) == 0
    assert timer.NoopTimer()("fwd").elapsed(reset=True) == timer.NoopTimer()("fwd").mean() == 0


def test_throughput_is_reported_at_its_boundaries(monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(100))
    monkeypatch.setattr(timer.time, "time", lambda: float(next(clock)) / 2 + 1)
    lines: list[str] = []
    config = SimpleNamespace(enabled=True, synchronized=True)
    rate = timer.ThroughputTimer(config, 4, start_step=1, steps_per_output=2, logging_fn=lines.append)
    assert rate.avg_samples_per_sec() == float("-inf")
    for _ in range(4):
        rate.start()
        rate.stop(global_step=False)
        rate.start()
        rate.stop(global_step=True)
    rate.update_epoch_count()
    assert (rate.epoch_count, rate.micro_step_count, rate.global_step_count) == (1, 0, 4)
    assert rate.avg_samples_per_sec() == 4.0  # 3 steps of 2 half seconds
    assert [line.split(",")[:2] for line in lines] == [
        ["epoch=0/micro_step=4/global_step=2", " RunningAvgSamplesPerSec=4.0"],
        ["epoch=0/micro_step=8/global_step=4", " RunningAvgSamplesPerSec=4.0"],
    ]


def test_cores_are_bound_as_numactl_wants(monkeypatch: pytest.MonkeyPatch):
    """Commands of DeepSpeed 0.19.8 for these nodes."""
    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    assert numa.parse_range_list("0,2-4,6") == [0, 2, 3, 4, 6]
    for text, message in (("4-2", "range end"), ("0-4,3", "ascend order"), ("a", "a number or two")):
        with pytest.raises(ValueError, match=message):
            numa.parse_range_list(text)

    def command(nodes: list[list[int]], cores: str | None, size: int, rank: int) -> str:
        monkeypatch.setattr(numa, "get_numa_cores", lambda: nodes)
        return " ".join(numa.get_numactl_cmd(cores, size, rank)[1])

    two = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert command(two, "0-7", 2, 1) == "numactl -m 1 -C 4-7"
    assert command(two, "0-1,4-5,7", 1, 0) == "numactl -C 0-1,4-5,7"
    assert command([[0, 1], [2, 3], [], []], "0-3", 2, 0) == "numactl -p 2 -C 0-1"
    assert command([[0, 1], [0, 1], [2], [2]], "0-1", 1, 0) == "numactl -m 0,1 -C 0-1"
    with pytest.raises(AssertionError, match="At least one core"):
        numa.get_numactl_cmd("0", 2, 0)
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    with pytest.raises(ValueError, match="KMP_AFFINITY conflicts with numactl"):
        numa.get_numactl_cmd("0", 1, 0)


def test_the_nodes_of_this_machine_are_read():
    cores = [core for node in numa.get_numa_cores() for core in node]
    assert cores == sorted(set(cores))


def test_versions_are_compared_as_numbers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    assert required_torch_version(min_version=2.9)
    assert required_torch_version(min_version="2.10.1", max_version="2.10.1")
    assert not required_torch_version(min_version="2.11")
    assert not required_torch_version(max_version=2.6)
    with pytest.raises(AssertionError, match="min_version or max_version"):
        required_torch_version()


def test_a_hook_sees_the_gradient():
    weight, seen = torch.ones(2, requires_grad=True), []
    handle = register_grad_hook(weight, lambda param: seen.append(param.grad.tolist()))
    (weight * 3).sum().backward()
    handle.remove()
    (weight * 3).sum().backward()
    assert seen == [[3.0, 3.0]]
    inside: list[bool] = []
    torch.func.grad(lambda x: inside.append(is_functorch_transforming()) or x.sum())(torch.ones(1))
    assert (inside, is_functorch_transforming()) == ([True], False)


def test_a_range_surrounds_the_call(monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    fake = SimpleNamespace(range_push=told.append, range_pop=lambda: told.append("pop"))
    monkeypatch.setattr("zengine.deepspeed.utils.nvtx.get_accelerator", lambda: fake)

    @instrument_w_nvtx
    def fail() -> None:
        told.append("run")
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [told[0].endswith("fail"), *told[1:]] == [True, "run", "pop"]
    monkeypatch.setattr("zengine.deepspeed.utils.nvtx.enable_nvtx", False)
    with pytest.raises(KeyError):
        fail()
    assert told[3:] == ["run"]


def test_levels_and_one_time_messages(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    before = ds_logging.logger.level
    try:
        set_log_level_from_string("info")
        assert ds_logging.should_log_le("info")
        assert not ds_logging.should_log_le("debug")
        with pytest.raises(ValueError, match="loud is not one of the valid logging levels"):
            set_log_level_from_string("loud")
        with caplog.at_level(logging.INFO, "zengine"):
            for _ in range(2):
                log_dist_once("only once", ranks=[0])
                ds_logging.logger.warning_once("warned once")  # type: ignore[attr-defined]
        assert caplog.messages == ["[rank 0] only once", "warned once"]
    finally:
        ds_logging.logger.setLevel(before)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else -1
    ds_logging.print_json_dist({"loss": 1.5}, ranks=[0], path=tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == {"loss": 1.5, "rank": rank}
    made = ds_logging.LoggerFactory.create_logger("of_this_test", logging.ERROR)
    assert (made.level, made.propagate, len(made.handlers)) == (logging.ERROR, False, 1)
    with pytest.raises(ValueError, match="name for logger cannot be None"):
        ds_logging.LoggerFactory.create_logger()


def test_an_mpu_is_asked_by_the_name_it_has():
    def mpu(**answers: Any) -> Any:
        return SimpleNamespace(**{f"get_{name}": lambda value=value: value for name, value in answers.items()})

    assert bwc.bwc_tensor_model_parallel_rank() == 0
    assert (
        bwc.bwc_tensor_model_parallel_world_size(mpu(slice_parallel_world_size=2, model_parallel_world_size=4)) == 2
    )
    assert bwc.bwc_tensor_model_parallel_group(mpu(model_parallel_group="g")) == "g"
    assert bwc.bwc_pipeline_parallel_world_size(mpu(model_parallel_world_size=4)) == 1
    assert bwc.bwc_pipeline_parallel_world_size(mpu(pipe_parallel_world_size=3)) == 3
    assert bwc.bwc_pipeline_parallel_group(mpu()) is None


def test_numbers_of_activations_are_deepspeeds():
    assert [kind.name for kind in GATED_ACTIVATION_TYPES] == ["GATED_GELU", "GATED_SILU"]
    assert (ActivationFuncType.ReLU, NormType.RMSNorm) == (2, 3)


def test_files_of_a_deepspeed_folder_are_sorted_by_rank(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"can't find \*_optim_states.pt files in directory"):
        get_optim_files(tmp_path)
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(12)]
    for name in (*names, "mp_rank_00_model_states.pt"):
        (tmp_path / name).touch()
    assert [Path(path).name for path in get_optim_files(str(tmp_path))] == names
    assert get_model_state_file(tmp_path, 2) == str(tmp_path / "mp_rank_00_model_states.pt")
    assert get_model_state_files(tmp_path) == [get_model_state_file(tmp_path, 1)]
    with pytest.raises(FileNotFoundError, match=r"can't find model states file at .*zero_pp_rank_0_mp_rank_00"):
        get_model_state_file(tmp_path, 3)


def test_messages_name_modules_and_parameters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    debug.debug_extract_module_and_param_names(model)
    weight = module_utils.recursive_getattr(model, "0.weight")
    assert debug.debug_module2name_class(model[0]) == "name=0 Linear"
    assert debug.debug_param2name_id_shape_device(weight) == (
        "name=0.weight id=none shape=torch.Size([3, 2]) device=cpu"
    )
    assert debug.debug_param2name_id_numel(weight) == "name=0.weight id=none numel=6"
    module_utils.recursive_setattr(model, "0.weight", torch.nn.Parameter(torch.ones(3, 2)))
    assert debug.debug_param2name(model[0].weight) == "unknown"
    assert model[0](torch.ones(2)).shape == (3,)
    monkeypatch.chdir(tmp_path)
    debug.log_rank_file(3, "a", 5)
    debug.log_rank_file(3, "b")
    assert Path("log_rank_3.txt").read_text() == "a\n5\nb\n"
    debug.printflock("locked")
    debug.print_rank0("hidden")
    debug.print_rank0("shown", force=True)
    assert capsys.readouterr().out == "locked\n[0] shown\n"


def test_the_section_of_the_timer_is_read():
    chosen = get_timers_config({"timers": {"throughput": {"synchronized": False}}})
    assert (chosen.enabled, chosen.synchronized) == (True, False)
    assert get_timers_config({}).synchronized
