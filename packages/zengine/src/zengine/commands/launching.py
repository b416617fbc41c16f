"""Command lines of torchrun and srun, as pure functions of the requested launch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import attrs

from zengine.commands.hosts import Host

__all__ = ["Launch", "default_nproc", "slurm_line", "torchrun_line"]

BOUND = "zengine.commands.bound"  # the module that binds a process to its cores and then runs the script


@attrs.frozen(kw_only=True)
class Launch:
    """Launch options shared by all hosts."""

    nproc: int  # processes on a host
    port: int  # of the rendezvous
    max_restarts: int
    binds_cores: bool
    script: tuple[str, ...]  # and its arguments; begins with "-m" for a module


def torchrun_line(
    launch: Launch, *, host: Host | None = None, index: int = 0, num_hosts: int = 1, master: str = ""
) -> list[str]:
    """Return the torchrun command of one host; without `host`, of this machine alone."""
    nproc = launch.nproc if host is None else len(host.devices)
    line = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}"]
    if launch.max_restarts:
        line.append(f"--max-restarts={launch.max_restarts}")
    if host is None:
        line.append("--standalone")
    else:
        line += [f"--nnodes={num_hosts}", f"--node-rank={index}"]
        line += [f"--master-addr={master}", f"--master-port={launch.port}"]
    line += ["-m", BOUND, *launch.script] if launch.binds_cores else [*launch.script]
    if host is not None and not host.uses_all:
        return ["env", f"CUDA_VISIBLE_DEVICES={','.join(map(str, host.devices))}", *line]
    return line


def slurm_line(launch: Launch, environ: Mapping[str, str], nproc: int) -> list[str]:
    """Return the srun command of an allocation: one torchrun per node, with the rendezvous on the first."""
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    per_node = nproc or (int(gpus) if gpus.isdigit() else launch.nproc)
    nodes = environ.get("SLURM_NNODES", "1")
    job = environ["SLURM_JOB_ID"]
    inner = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={per_node}"),
        *("--rdzv-backend=c10d", f"--rdzv-id={job}", f"--rdzv-endpoint={_first_node(environ)}:{launch.port}"),
        *((f"--max-restarts={launch.max_restarts}",) if launch.max_restarts else ()),
        *(("-m", BOUND) if launch.binds_cores else ()),
        *launch.script,
    ]
    return ["srun", f"--nodes={nodes}", "--ntasks-per-node=1", *inner]


def default_nproc(environ: Mapping[str, str]) -> int:
    """Return the number of visible GPUs of this host, at least 1."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        listed = [part for part in environ["CUDA_VISIBLE_DEVICES"].split(",") if part.strip() not in ("", "-1")]
        return max(1, len(listed))
    import torch

    return max(1, torch.cuda.device_count())


def _first_node(environ: Mapping[str, str]) -> str:
    """Return the first name of SLURM's node list: gpu003 of "gpu[003-007,9],x1"."""
    listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or os.uname().nodename
    name, bracket, rest = listed.partition("[")
    if not bracket or "," in name:
        return listed.partition(",")[0]
    return name + rest.partition("]")[0].partition(",")[0].partition("-")[0]
