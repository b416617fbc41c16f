"""Command lines of torchrun and srun."""

from __future__ import annotations

import sys

import attrs
import pytest

from zengine.commands.run import Host, Launch, default_nproc, slurm_line, torchrun_line

LAUNCH = Launch(nproc=2, port=29500, max_restarts=0, binds_cores=False, script=("train.py", "--lr", "1"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def test_one_host_stands_alone() -> None:
    assert torchrun_line(LAUNCH) == [*TORCHRUN, "--nproc-per-node=2", "--standalone", "train.py", "--lr", "1"]


def test_restarts_and_cores_are_asked_for() -> None:
    line = torchrun_line(attrs.evolve(LAUNCH, max_restarts=3, binds_cores=True))
    assert "--max-restarts=3" in line
    assert line[-5:] == ["-m", "zengine.commands.bound", "train.py", "--lr", "1"]


def test_a_host_of_several_knows_its_place_and_its_devices() -> None:
    line = torchrun_line(LAUNCH, host=Host("b", (0, 2), 4), index=1, num_hosts=2, master="a")
    assert line[:2] == ["env", "CUDA_VISIBLE_DEVICES=0,2"]
    assert line[2:-3] == [
        *TORCHRUN,
        *("--nproc-per-node=2", "--nnodes=2", "--node-rank=1", "--master-addr=a", "--master-port=29500"),
    ]
    assert torchrun_line(LAUNCH, host=Host("a", (0, 1), 2), num_hosts=2, master="a")[0] == sys.executable


@pytest.mark.parametrize(
    ("nodes", "first"), [("gpu[003-007,9],x1", "gpu003"), ("n1,n2", "n1"), ("a,gpu[1-2]", "a"), ("solo", "solo")]
)
def test_slurm_gets_one_torchrun_a_node(nodes: str, first: str) -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "3", "SLURM_JOB_NODELIST": nodes, "SLURM_GPUS_ON_NODE": "4"}
    line = slurm_line(LAUNCH, environ, 0)
    assert line[:4] == ["srun", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1"]
    assert {"--nproc-per-node=4", "--nnodes=3", f"--rdzv-endpoint={first}:29500"} <= set(line)
    assert "--nproc-per-node=8" in slurm_line(LAUNCH, environ, 8)


@pytest.mark.parametrize(("visible", "count"), [("0,3", 2), ("", 1), ("-1", 1), ("GPU-abc", 1)])
def test_visible_devices_decide_how_many_processes(visible: str, count: int) -> None:
    assert default_nproc({"CUDA_VISIBLE_DEVICES": visible}) == count
