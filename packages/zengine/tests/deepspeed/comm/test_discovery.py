"""Ranks of MPI jobs and clouds, written to the environment."""

from __future__ import annotations

import os

import pytest
import torch

import zengine.deepspeed.comm as dist
from zengine.deepspeed.comm import comm, pg_utils

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
