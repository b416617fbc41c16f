"""Ranks of MPI jobs and clouds, written to the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest
import torch

import zengine.deepspeed.comm as dist
from zengine.deepspeed.comm import comm, pg_utils, world
from zengine.deepspeed.comm.discovery import discover_ranks

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = {key: value for key, value in os.environ.items() if key not in NAMES}
    monkeypatch.setattr(os, "environ", found)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # other tests may have left a group
    return found


def written(environ: dict[str, str]) -> list[str | None]:
    return [environ.get(name) for name in NAMES]


def test_which_cloud_this_is(environ: dict[str, str]) -> None:
    assert not any((dist.in_aml(), dist.in_aws_sm(), dist.in_dlts()))
    environ.update(AZUREML_EXPERIMENT_ID="1", SM_TRAINING_ENV="1", DLTS_JOB_ID="1")
    assert all((comm.in_aml(), comm.in_aws_sm(), comm.in_dlts()))


def open_mpi(environ: dict[str, str], hosts: int = 1) -> None:
    names = {"RANK": 3, "SIZE": 4, "LOCAL_RANK": 3 // hosts, "LOCAL_SIZE": 4 // hosts}
    environ.update({f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()})


def test_an_mpi_job_by_its_launcher_s_variables(environ: dict[str, str]) -> None:
    open_mpi(environ)
    dist.mpi_discovery(distributed_port=1234, verbose=False)
    assert written(environ) == ["3", "3", "4", "127.0.0.1", "1234"]


def test_init_distributed_writes_the_ranks_of_an_mpi_job(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Mapping[str, str]] = []
    monkeypatch.setattr(world.zcomm, "init", lambda environ, **_: seen.append(environ))
    open_mpi(environ)
    dist.init_distributed(auto_mpi_discovery=False)
    assert written(environ) == [None] * 5
    dist.init_distributed("gloo", distributed_port=1234)
    assert written(environ) == written(dict(seen[-1])) == ["3", "3", "4", "127.0.0.1", "1234"]
    environ.update(RANK="0", WORLD_SIZE="1")
    dist.init_distributed()  # a launcher that sets RANK counts
    assert written(environ)[:3] == ["0", "3", "1"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_PORT": "77"}, ["1", "1", "2", "127.0.0.1", "77"]),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODELIST": "n[7-8]"}, ["1", "0"]),
        ({"RANK": "5", "PMI_RANK": "1", "PMI_SIZE": "2"}, ["5", None]),
        ({"AZUREML_EXPERIMENT_ID": "1"}, [None]),
    ],
)
def test_other_launchers_than_torch_s(
    environ: dict[str, str], given: dict[str, str], expected: list[str | None]
) -> None:
    environ.update(given)
    discover_ranks(verbose=False)
    assert written(environ)[: len(expected)] == expected


def test_clouds_are_asked_first_and_several_hosts_need_an_address(environ: dict[str, str]) -> None:
    open_mpi(environ, hosts=2)
    with pytest.raises(ValueError, match=r"MASTER_ADDR is missing .* mpirun -x MASTER_ADDR"):
        discover_ranks()
    environ["SM_TRAINING_ENV"] = "1"
    discover_ranks()
    assert written(environ) == ["3", "1", "4", None, None]
    del environ["RANK"]
    environ.update(AZUREML_EXPERIMENT_ID="1", AZ_BATCH_MASTER_NODE="first:77")
    discover_ranks()
    assert written(environ) == ["3", "1", "4", "first", "6105"]


def test_azure_and_sage_maker(environ: dict[str, str]) -> None:
    open_mpi(environ)
    dist.patch_aws_sm_env_for_torch_nccl_backend()
    assert written(environ) == ["3", "3", "4", None, None]
    environ["AZ_BATCHAI_MPI_MASTER_NODE"] = "node"
    dist.patch_aml_env_for_torch_nccl_backend(verbose=False)
    assert written(environ) == ["3", "3", "4", "node", "54965"]
    assert environ["NCCL_SOCKET_IFNAME"] == "^docker0,lo"
    open_mpi(environ, hosts=2)
    del environ["MASTER_PORT"]
    environ["AZ_BATCH_MASTER_NODE"] = "first:77"
    dist.patch_aml_env_for_torch_nccl_backend(verbose=False)
    assert written(environ) == ["3", "1", "4", "first", "6105"]


def test_no_group_is_no_parallelism() -> None:
    assert not pg_utils.is_parallel(None)
