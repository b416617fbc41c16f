"""Commands for several hosts: read, not run."""

from __future__ import annotations

import pytest

from zengine.deepspeed.launcher import launcher_helper, multinode_runner, runner

POOL = {"worker-0": 2, "worker-1": 2}
DEVICES = {"worker-0": [0, 1], "worker-1": [0, 1]}
SCRIPT = ["-u", "-m", "zengine.as_deepspeed", "train.py", "--epochs", "3"]


def line_of(kind: type[multinode_runner.MultiNodeRunner], *options: str) -> list[str]:
    args = runner.parse_args([*options, "train.py", "--epochs", "3"])
    made = kind(args, runner.encode_world_info(DEVICES), POOL)
    made.add_export("NCCL_DEBUG", "INFO")
    found: list[str] = made.get_cmd({}, DEVICES)
    return found


def test_pdsh_starts_the_launcher_of_each_host():
    args = runner.parse_args(["--ssh_port", "22", "--no_local_rank", "train.py", "--prompt", 'say "x y"'])
    made = multinode_runner.PDSHRunner(args, "abc")
    line, kill, environment = made.get_cmd({}, DEVICES)
    assert (line[0], line[line.index("-w") + 1]) == ("pdsh", "worker-0,worker-1")
    assert environment["PDSH_RCMD_TYPE"] == "ssh"
    assert environment["PDSH_SSH_ARGS_APPEND"].endswith("-p 22")
    assert {"zengine.deepspeed.launcher.launch", "--node_rank=%n", "--no_local_rank"} <= set(line)
    assert line[-3:] == ["train.py", "--prompt", '"say \\"x y\\""']
    assert "--world_info=abc" in kill[-1]


def test_open_mpi_uses_eth0_unless_told():
    line = line_of(multinode_runner.OpenMPIRunner)
    assert (line[0], line[line.index("-n") + 1], line[-6:]) == ("mpirun", "4", SCRIPT)
    assert "eth0" in line
    assert "NCCL_DEBUG=INFO" in line
    for dashes in ("-mca", "--mca"):
        given = line_of(multinode_runner.OpenMPIRunner, f"--launcher_args={dashes} btl_tcp_if_include eth1")
        assert "eth1" in given
        assert "eth0" not in given
    with pytest.raises(ValueError, match="openmpi backend does not support worker include/exclusion"):
        line_of(multinode_runner.OpenMPIRunner, "--include=worker-0")


def test_the_other_kinds_of_mpi(monkeypatch: pytest.MonkeyPatch, tmp_path):
    hostfile = tmp_path / "hosts"
    monkeypatch.setattr(multinode_runner, "MVAPICH_TMP_HOSTFILE", str(hostfile))
    line = line_of(multinode_runner.MVAPICHRunner)
    assert (line[line.index("-np") + 1], hostfile.read_text()) == ("4", "worker-0\nworker-1\n")
    line = line_of(multinode_runner.MPICHRunner)
    assert line[line.index("-hosts") + 1] == "worker-0,worker-1"
    assert line[line.index("WORLD_SIZE") + 1] == "4"
    line = line_of(multinode_runner.IMPIRunner)
    ranks = [line[index + 1] for index, word in enumerate(line) if word == "RANK"]
    assert (ranks, line.count(":")) == (["0", "1", "2", "3"], 3)


def test_slurm_counts_the_selected_devices():
    line = line_of(multinode_runner.SlurmRunner, "--include=worker-0@worker-1")
    assert (line[0], line[line.index("-n") + 1]) == ("srun", "4")
    assert line[line.index("--nodelist") + 1] == "worker-0,worker-1"
    assert "--export=ALL,NCCL_DEBUG=INFO" in line
    line = line_of(multinode_runner.SlurmRunner, "--num_gpus=2")
    assert line[line.index("--gpus-per-node") + 1] == "2"
    for wrong, reason in (({"a": [1]}, "specific device ids"), ({"a": [0], "b": [0, 1]}, "same slot count")):
        with pytest.raises(ValueError, match=reason):
            multinode_runner.SlurmRunner.validate_active_resources(wrong)


def test_mpich_tells_the_rank():
    names = (("PMIX_RANK", "PMI_RANK"), ("MPI_LOCALRANKID",))
    found = launcher_helper.env_mapping({"PMI_RANK": "3", "MPI_LOCALRANKID": "1"}, *names)
    assert (found["RANK"], found["LOCAL_RANK"]) == ("3", "1")
    with pytest.raises(OSError, match="RANK is not in the environment"):
        launcher_helper.env_mapping({}, *names)
