"""`deepspeed.comm`: ranks of MPI jobs and of cloud services, written to the variables that torch reads.

`init_distributed` needs none of these: it reads Open MPI's, SLURM's and PMI's variables itself.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import zcomm
from zengine.deepspeed.comm.constants import DEFAULT_AML_MASTER_PORT, DEFAULT_AML_NCCL_SOCKET_IFNAME
from zengine.deepspeed.comm.world import get_rank, get_world_size, is_initialized
from zengine.deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT

__all__ = [
    "in_aml",
    "in_aws_sm",
    "in_dlts",
    "mpi_discovery",
    "patch_aml_env_for_torch_nccl_backend",
    "patch_aws_sm_env_for_torch_nccl_backend",
]

log = logging.getLogger("zengine")

_WRITTEN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def in_aml() -> bool:
    """Return True in a job of Azure Machine Learning."""
    return "AZUREML_EXPERIMENT_ID" in os.environ


def in_aws_sm() -> bool:
    """Return True in a job of AWS SageMaker."""
    return "SM_TRAINING_ENV" in os.environ


def in_dlts() -> bool:
    """Return True in a job of a DLTS cluster."""
    return "DLTS_JOB_ID" in os.environ


def mpi_discovery(distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True) -> None:
    """Write the ranks of an MPI job to the environment, by the launcher's variables; mpi4py is not needed.

    A job of several hosts needs MASTER_ADDR.

    Raises:
        ValueError: a variable is missing or contradicts another.
        AssertionError (DeepSpeed's): torch.distributed runs already, with other ranks.
    """
    own = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    launch = zcomm.detect(own)
    rank, world_size = launch.rank, launch.world_size
    if is_initialized():
        assert get_rank() == rank, f"MPI rank {rank} does not match torch rank {get_rank()}"
        assert get_world_size() == world_size, (
            f"MPI world size {world_size} does not match torch world size {get_world_size()}"
        )
    _write([rank, launch.local_rank, world_size, launch.address, distributed_port], "MPI", verbose=verbose)


def patch_aml_env_for_torch_nccl_backend(master_port: int = 6105, verbose: bool = True) -> None:
    """Write the ranks of an Azure ML job, started by Open MPI, to the environment.

    Raises KeyError naming the variable of the service that is missing.
    """
    environ = os.environ
    if environ["OMPI_COMM_WORLD_LOCAL_SIZE"] == environ["OMPI_COMM_WORLD_SIZE"]:
        address, port = environ["AZ_BATCHAI_MPI_MASTER_NODE"], DEFAULT_AML_MASTER_PORT
    else:
        address, port = environ["AZ_BATCH_MASTER_NODE"].split(":")[0], environ.get("MASTER_PORT", str(master_port))
    environ["NCCL_SOCKET_IFNAME"] = DEFAULT_AML_NCCL_SOCKET_IFNAME
    _write([*_open_mpi(), address, port], "AzureML", verbose=verbose)


def patch_aws_sm_env_for_torch_nccl_backend(verbose: bool = True) -> None:
    """Write the ranks of a SageMaker job, started by Open MPI, to the environment.

    Raises KeyError naming the variable that is missing.
    """
    _write(_open_mpi(), "AWS SageMaker", verbose=verbose)


def _open_mpi() -> list[str]:
    return [os.environ[f"OMPI_COMM_WORLD_{name}"] for name in ("RANK", "LOCAL_RANK", "SIZE")]


def _write(values: list[Any], source: str, *, verbose: bool) -> None:
    """Set the first variables of _WRITTEN."""
    pairs = dict(zip(_WRITTEN, map(str, values)))
    os.environ.update(pairs)
    if verbose:
        log.info("%s: %s", source, ", ".join(f"{name}={value}" for name, value in pairs.items()))
