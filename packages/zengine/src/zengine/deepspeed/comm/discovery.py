"""`deepspeed.comm`: ranks of MPI jobs and of cloud services, written to the variables that torch reads.

zcomm reads Open MPI's, SLURM's and PMI's variables itself.  `init_distributed` writes torch's for scripts that read
LOCAL_RANK and the others afterwards, as they can with DeepSpeed.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch.distributed as dist

import zcomm
from zengine.deepspeed.comm.constants import DEFAULT_AML_MASTER_PORT, DEFAULT_AML_NCCL_SOCKET_IFNAME
from zengine.deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT

__all__ = [
    "discover_ranks",
    "in_aml",
    "in_aws_sm",
    "in_dlts",
    "mpi_discovery",
    "patch_aml_env_for_torch_nccl_backend",
    "patch_aws_sm_env_for_torch_nccl_backend",
]

log = logging.getLogger("zengine")

_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_WRITTEN = (*_RANKS, "MASTER_ADDR", "MASTER_PORT")


def in_aml() -> bool:
    """Return True in a job of Azure Machine Learning."""
    return "AZUREML_EXPERIMENT_ID" in os.environ


def in_aws_sm() -> bool:
    """Return True in a job of AWS SageMaker."""
    return "SM_TRAINING_ENV" in os.environ


def in_dlts() -> bool:
    """Return True in a job of a DLTS cluster."""
    return "DLTS_JOB_ID" in os.environ


def discover_ranks(distributed_port: int | None = None, *, verbose: bool = True) -> None:
    """Write this process's rank to the environment if RANK is missing and another launcher than torch's started it.

    distributed_port: default: MASTER_PORT, or 29500.  Raises what `mpi_discovery` does.
    """
    if "RANK" in os.environ:
        return
    if "OMPI_COMM_WORLD_RANK" in os.environ and in_aml() and not in_dlts():
        patch_aml_env_for_torch_nccl_backend(verbose=verbose)
    elif "OMPI_COMM_WORLD_RANK" in os.environ and in_aws_sm():
        patch_aws_sm_env_for_torch_nccl_backend(verbose=verbose)
    elif _launch().source != "single":
        own = os.environ.get("MASTER_PORT")
        mpi_discovery(int(own or distributed_port or TORCH_DISTRIBUTED_DEFAULT_PORT), verbose)


def _launch() -> zcomm.Launch:
    """Return the launch that MPI's or SLURM's variables describe."""
    return zcomm.detect({key: value for key, value in os.environ.items() if key not in _RANKS})


def mpi_discovery(distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True) -> None:
    """Write the ranks of an MPI job to the environment, by the launcher's variables; mpi4py is not needed.

    A job of several hosts needs MASTER_ADDR.

    Raises:
        ValueError: a variable is missing or contradicts another.
        AssertionError (DeepSpeed's): torch.distributed runs already, with other ranks.
    """
    launch = _launch()
    rank, world_size = launch.rank, launch.world_size
    if dist.is_initialized():
        assert dist.get_rank() == rank, f"MPI rank {rank} does not match torch rank {dist.get_rank()}"
        assert dist.get_world_size() == world_size, (
            f"MPI world size {world_size} does not match torch world size {dist.get_world_size()}"
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
