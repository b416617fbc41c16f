"""`zengine run`: what it would start, and two ranks on this machine."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from zengine.cli import main
from zengine.commands import CommandError
from zengine.commands.run import commands, unnamed_address, variables

SCRIPT = """
import os, sys
import torch, zcomm
with zcomm.init() as world:
    total = torch.ones(1)
    zcomm.all_reduce(total)
    cores = len(os.sched_getaffinity(0))
    with open(f"rank{world.rank}.txt", "w") as file:
        file.write(f"{world.world_size} ranks, {total.item():.0f}, {sys.argv[1:]}, {cores} cores")
"""


def test_two_ranks_meet_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "zengine", "run", "--nproc", "2", "--bind-cores", "hello.py", "--lr", "1"]
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    told = [(tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 1)]
    assert told == [f"2 ranks, 2, ['--lr', '1'], {share} cores"] * 2


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    path = tmp_path / "hosts"
    path.write_text("alpha slots=8\nbeta slots=8\n")
    return str(path)


def test_a_hostfile_becomes_a_command_for_each_host(hostfile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--hostfile", hostfile, "--include", "alpha@beta:0,1", "--dry-run", "train.py"]) == 0
    alpha, beta = capsys.readouterr().out.splitlines()
    assert alpha.startswith("alpha: ")
    assert "--nproc-per-node=8 --nnodes=2 --node-rank=0 --master-addr=alpha" in alpha
    assert beta.startswith("beta: env CUDA_VISIBLE_DEVICES=0,1 ")
    assert "--nproc-per-node=2 --nnodes=2 --node-rank=1 --master-addr=alpha" in beta


def test_a_host_that_is_not_in_the_file_prints_and_says_so(hostfile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--hostfile", hostfile, "train.py"]) == 1
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 2
    assert "is not in the hostfile (alpha, beta): run the line above on each" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hostfile", "/no/such", "x.py"], "--hostfile /no/such: No such file or directory"),
        (["--include", "a", "x.py"], "on one host set CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_is_wrong_is_said_with_status_1(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments]) == 1
    assert message in capsys.readouterr().err


def asked(**given: object) -> argparse.Namespace:
    texts = dict.fromkeys(("hostfile", "include", "exclude", "master_addr", "elastic"), "")
    numbers = {
        "nproc": 0,
        "master_port": 29500,
        "max_restarts": None,
        "job_id": "zengine",
        "bind_cores": False,
        "keep_memory": False,
        "module": False,
    }
    return argparse.Namespace(**{**texts, **numbers, "script": "train.py", "arguments": [], **given})


def test_an_allocation_of_several_nodes_becomes_srun_once() -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "CUDA_VISIBLE_DEVICES": "0"}
    ((host, line),) = commands(asked(), slurm, "n1")
    assert (host, line[0]) == ("", "srun")
    ((_, inside),) = commands(asked(), {**slurm, "SLURM_STEP_ID": "0"}, "n1")
    assert "--standalone" in inside


def test_hosts_of_an_elastic_job_share_one_list() -> None:
    ((host, line),) = commands(asked(elastic="1:4", master_addr="a", nproc=2), {}, "here")
    assert host == ""
    assert {"--nnodes=1:4", "--nproc-per-node=2", "--max-restarts=100", "--rdzv-endpoint=a:29500"} <= set(line)
    assert "--rdzv-id=zengine" in line
    assert variables(asked(elastic="1:4"), {})["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    with pytest.raises(CommandError, match='--elastic "4:1" is not MIN:MAX, such as 1:4'):
        commands(asked(elastic="4:1"), {}, "here")


def test_an_elastic_job_of_an_allocation_runs_on_all_its_nodes() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "16"}
    ((_, line),) = commands(asked(elastic="1:2", nproc=1), environ, "n1")
    assert line[:6] == ["srun", "--no-kill", "--kill-on-bad-exit=0", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    assert {"--nnodes=1:2", "--rdzv-endpoint=n1:29500"} <= set(line)
    environ["SLURM_GPUS_ON_NODE"] = "4"
    ((_, line),) = commands(asked(elastic="1:2", master_addr="n2"), environ, "n1")
    assert {"--nproc-per-node=4", "--rdzv-endpoint=n2:29500"} <= set(line)
    ((_, line),) = commands(asked(elastic="1:2", nproc=1), environ | {"SLURM_STEP_ID": "0"}, "n1")
    assert line[0] != "srun"


def test_an_elastic_job_of_a_hostfile_meets_at_its_first_host(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=4\n")
    lines = commands(asked(elastic="1:2", hostfile=str(tmp_path / "hosts"), max_restarts=3), {}, "a")
    assert [host for host, _ in lines] == ["a", "b"]
    for (_, line), nproc in zip(lines, (2, 4)):
        assert {"--rdzv-endpoint=a:29500", f"--nproc-per-node={nproc}", "--max-restarts=3"} <= set(line)


def test_modules_and_threads() -> None:
    ((_, line),) = commands(asked(module=True, nproc=1), {}, "here")
    assert line[-2:] == ["-m", "train.py"]
    cores = len(os.sched_getaffinity(0))
    assert variables(asked(nproc=1), {}) == {"OMP_NUM_THREADS": str(cores)}
    assert variables(asked(nproc=10 * cores), {}) == {"OMP_NUM_THREADS": "1"}
    assert variables(asked(), {"OMP_NUM_THREADS": "3"}) == {}
    kept = variables(asked(keep_memory=True), {"OMP_NUM_THREADS": "3", "MALLOC_MMAP_MAX_": "5"})
    assert list(kept) == ["MALLOC_TRIM_THRESHOLD_"]  # what the user has set stays


def test_a_host_is_told_its_address_if_its_name_has_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from zengine.commands import run

    monkeypatch.setattr(run, "_source_address", lambda address, port: "10.7.0.1")
    assert unnamed_address("10.7.0.1:29500") == "10.7.0.1"

    def line(address: str) -> list[str]:
        ((_, found),) = commands(asked(elastic="1:2", master_addr=address), {}, "here")
        return [part for part in found if part.startswith(("--local-addr", "--rdzv-conf"))]

    monkeypatch.setattr(run.socket.socket, "connect_ex", lambda probe, target: 111)  # nobody listens
    conf = f"--rdzv-conf={run.MEMBERSHIP}"
    assert line("10.7.0.1") == [f"{conf},is_host=1", "--local-addr=10.7.0.1"]
    assert line("10.7.0.2") == [f"{conf},is_host=0", "--local-addr=10.7.0.1"]
    monkeypatch.setattr(run.socket.socket, "connect_ex", lambda probe, target: 0)  # another process of this host
    assert line("10.7.0.1") == [f"{conf},is_host=0", "--local-addr=10.7.0.1"]
    monkeypatch.undo()
    assert unnamed_address("localhost:29500") == ""
    assert unnamed_address("no-such-host.invalid:29500") == ""
    monkeypatch.setattr(run, "_source_address", lambda address, port: "10.7.0.1")
    names = [(socket.AF_INET, 0, 0, "", ("10.7.0.1", 0))]
    monkeypatch.setattr(run.socket, "getaddrinfo", lambda *given, **more: names)
    assert unnamed_address("10.7.0.1:29500") == ""  # the name has it: torchrun finds it out
