"""detect() reads an environment; each launcher is a row."""

from __future__ import annotations

import attrs
import pytest

from zcomm import Launch, detect
from zcomm.groups.launch import first_host

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "4321",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODELIST": "gpu[007-010,12],cpu1",
    "SLURM_JOB_ID": "31007",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "head"}

ROWS = {
    "nobody": ({}, Launch(0, 1, 0, 1, "127.0.0.1", 29500, "single")),
    "torchrun": (TORCHRUN, Launch(5, 8, 1, 4, "node0", 4321, "torchrun")),
    "the four variables of env:// by hand": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        Launch(1, 2, 1, 2, "localhost", 1, "torchrun"),
    ),
    "DeepSpeed's launcher says LOCAL_SIZE": (
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "", "LOCAL_SIZE": "2"},
        Launch(5, 8, 1, 2, "node0", 4321, "torchrun"),
    ),
    "LOCAL_SIZE of an outer launch of more processes": (
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "8"},
        Launch(0, 1, 0, 1, "127.0.0.1", 29500, "torchrun"),
    ),
    "LOCAL_WORLD_SIZE needs no LOCAL_SIZE": (
        {**TORCHRUN, "LOCAL_SIZE": "auto"},
        Launch(5, 8, 1, 4, "node0", 4321, "torchrun"),
    ),
    "LOCAL_SIZE alone": ({"LOCAL_SIZE": "8"}, Launch(0, 1, 0, 1, "127.0.0.1", 29500, "single")),
    "one torchrun rank needs no address": (
        {"RANK": "0", "WORLD_SIZE": "1"},
        Launch(0, 1, 0, 1, "127.0.0.1", 29500, "torchrun"),
    ),
    "torchrun under srun": ({**SLURM, **TORCHRUN}, Launch(5, 8, 1, 4, "node0", 4321, "torchrun")),
    "srun": (SLURM, Launch(3, 4, 1, 2, "gpu007", 15000 + 31007 % 15000, "slurm")),
    "srun with uneven nodes": (
        {**SLURM, "SLURM_TASKS_PER_NODE": "1,3"},
        Launch(3, 4, 1, 3, "gpu007", 15000 + 31007 % 15000, "slurm"),
    ),
    "srun with the address given": (
        {**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "77"},
        Launch(3, 4, 1, 2, "head", 77, "slurm"),
    ),
    "a step smaller than its job": (
        {**SLURM, "SLURM_NTASKS": "64", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "gpu008"},
        Launch(3, 4, 1, 2, "gpu008", 15000 + 31007 % 15000, "slurm"),
    ),
    "one SLURM task": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        Launch(0, 1, 0, 1, "127.0.0.1", 15000, "slurm"),
    ),
    "a shell of salloc has no task": ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}, detect({})),
    "mpirun on one machine": (OPEN_MPI, Launch(1, 2, 1, 2, "127.0.0.1", 29500, "mpi")),
    "mpirun inside an sbatch script": (
        {**OPEN_MPI, "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
        Launch(1, 2, 1, 2, "127.0.0.1", 29500, "mpi"),
    ),
    "mpirun on two machines": (
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "head"},
        Launch(1, 4, 1, 2, "head", 29500, "mpi"),
    ),
    "mpiexec": (PMI, Launch(3, 4, 1, 2, "head", 29500, "mpi")),
    "mpiexec inside an sbatch script": (
        {**PMI, "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        Launch(3, 4, 1, 2, "head", 29500, "mpi"),
    ),
    "srun that also speaks PMI": (
        {**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"},
        Launch(3, 4, 1, 2, "gpu007", 15000 + 31007 % 15000, "slurm"),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_each_launcher_is_understood(name: str) -> None:
    environ, launch = ROWS[name]
    assert detect(environ) == launch


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_torchrun_variable_is_named(missing: str) -> None:
    environ = {key: value for key, value in TORCHRUN.items() if key != missing}
    with pytest.raises(
        ValueError, match=rf"torchrun launch: environment variable {missing} is missing \(set: .*LOCAL"
    ):
        detect(environ)


@pytest.mark.parametrize(
    ("base", "missing", "named"),
    [
        (SLURM, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS or SLURM_NTASKS or SLURM_NPROCS is missing"),
        (SLURM, "SLURM_LOCALID", "SLURM_LOCALID is missing"),
        (SLURM, "SLURM_NODELIST", "SLURM_STEP_NODELIST or SLURM_NODELIST or SLURM_JOB_NODELIST is missing"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE is missing"),
        (PMI, "PMI_SIZE", "PMI_SIZE is missing"),
        (PMI, "MASTER_ADDR", "MASTER_ADDR is missing.*mpirun -x MASTER_ADDR"),
    ],
)
def test_a_missing_variable_of_slurm_or_mpi_is_named(base: dict[str, str], missing: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        detect({key: value for key, value in base.items() if key != missing})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "rank 8 must be from 0 to world_size - 1, and world_size is 8"),
        ({"RANK": "-1"}, "rank -1 must be"),
        ({"LOCAL_RANK": "4"}, "local_rank 4 must be from 0 to local_world_size - 1, and local_world_size is 4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "9 processes on this machine.*more than world_size 8"),
        ({"WORLD_SIZE": "0"}, "rank 5 must be"),
        ({"WORLD_SIZE": "eight"}, "WORLD_SIZE='eight' is not a whole number"),
        ({"MASTER_PORT": "70000"}, "port 70000 must be from 1 to 65535; set MASTER_PORT"),
    ],
)
def test_contradictions_are_rejected(change: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        detect({**TORCHRUN, **change})


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[3-5]", "node3"),
        ("node[003,007-009]", "node003"),
        ("rack[1-2]-gpu,other", "rack1-gpu"),
        ("gpu-a[01-02],gpu-b7", "gpu-a01"),
    ],
)
def test_the_first_host_of_a_compressed_node_list(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


def test_an_empty_node_list_asks_for_the_address() -> None:
    with pytest.raises(ValueError, match="no first host; set MASTER_ADDR"):
        first_host("[")


def test_without_an_argument_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in TORCHRUN.items():
        monkeypatch.setenv(key, value)
    assert detect() == ROWS["torchrun"][1]


def test_two_open_mpi_jobs_on_a_machine_meet_at_different_ports() -> None:
    ports = {detect({**OPEN_MPI, "PMIX_NAMESPACE": name}).port for name in ("prterun-a-1@1", "prterun-a-2@1")}
    assert len(ports) == 2
    assert all(15000 <= port < 30000 for port in ports)


def test_only_a_loopback_address_or_a_world_of_one_is_certain_to_stay_on_the_machine() -> None:
    launch = ROWS["torchrun"][1]
    assert not launch.meets_on_loopback
    assert attrs.evolve(launch, address="127.0.0.1").meets_on_loopback
    assert attrs.evolve(launch, address="localhost").meets_on_loopback
    assert detect({}).meets_on_loopback
