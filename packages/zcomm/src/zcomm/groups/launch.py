"""Launch detection: rank, world size and address of this process, from its launcher's environment variables.

`detect` reads an environment and nothing else: no socket, no torch, so each launcher is a table row in a test.
Launchers nest (torchrun under srun, mpirun inside an sbatch script), and the innermost must win:

1. torchrun, and every launcher that sets its variables: RANK, WORLD_SIZE.
2. Open MPI's mpirun, which alone sets its variables for each process.
3. SLURM's srun.  An sbatch script is itself a task 0, so SLURM's variables may be inherited only; PMI variables that
   contradict them win.
4. PMI (MPICH, Intel MPI, Cray).
5. No launcher: a world of one.

If a launcher gives no address, SLURM's is the first host of the node list, with a port derived from the job id, so
that two jobs on a node do not meet; MPI's is this machine if all ranks are on it, else MASTER_ADDR.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping

import attrs

__all__ = ["Launch", "detect"]

_DEFAULT_PORT = 29500


@attrs.frozen
class Launch:
    """Position of one process in a launch.  Invariant: 0 <= rank < world_size, 0 <= local_rank < local_world_size.

    Raises ValueError for a rank, a local size or a port out of range.
    """

    rank: int  # of this process
    world_size: int  # number of processes
    local_rank: int  # of this process on its machine; the index of its GPU
    local_world_size: int  # processes on this machine
    address: str  # host of rank 0 for the rendezvous; unused at world size 1
    port: int  # on that host
    source: str  # launcher: "torchrun", "slurm", "mpi", "single"; "adopted" if taken from an existing group

    def __attrs_post_init__(self) -> None:
        for name, of in (("rank", "world_size"), ("local_rank", "local_world_size")):
            if not 0 <= getattr(self, name) < getattr(self, of):
                raise ValueError(
                    f"{self.source} launch: {name} {getattr(self, name)} must be from 0 to {of} - 1, "
                    f"and {of} is {getattr(self, of)}."
                )
        if self.local_world_size > self.world_size:
            raise ValueError(
                f"{self.source} launch: {self.local_world_size} processes on this machine (local_world_size) "
                f"are more than world_size {self.world_size}."
            )
        if not 0 < self.port < 65536:
            raise ValueError(f"{self.source} launch: port {self.port} must be from 1 to 65535; set MASTER_PORT.")

    @property
    def meets_on_loopback(self) -> bool:
        """True if all ranks are certainly on this machine, so that no other network interface is needed."""
        return self.world_size == 1 or self.address in ("localhost", "::1") or self.address.startswith("127.")


SINGLE = Launch(0, 1, 0, 1, "127.0.0.1", _DEFAULT_PORT, "single")


def detect(environ: Mapping[str, str] | None = None) -> Launch:
    """Return the launch that `environ` (by default os.environ) describes.

    Raises ValueError naming the variable that is missing, not a number, or contradicts another.
    """
    env = os.environ if environ is None else environ
    if "RANK" in env or "WORLD_SIZE" in env:
        return _torchrun(Variables("torchrun", env))
    if "OMPI_COMM_WORLD_RANK" in env:
        return _open_mpi(Variables("mpi", env))
    if "SLURM_PROCID" in env and not _pmi_contradicts_slurm(env):
        return _slurm(Variables("slurm", env))
    if "PMI_RANK" in env:
        return _pmi(Variables("mpi", env))
    return SINGLE


@attrs.frozen
class Variables:
    """An environment; its errors name the launcher."""

    source: str
    env: Mapping[str, str]

    @property
    def advice(self) -> str:
        """What to do about a missing or wrong variable."""
        if self.source != "torchrun":
            return "Start the script through its launcher, or set it."
        return (
            "Start the script with torchrun --nproc-per-node=N, which sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR "
            "and MASTER_PORT, or set them all; for a single process, unset RANK and WORLD_SIZE."
        )

    def text(self, *names: str, advice: str = "") -> str:
        """Value of the first of `names` that is set."""
        for name in names:
            if self.env.get(name):
                return self.env[name]
        beside = ", ".join(sorted(key for key in self.env if _LAUNCH_WORD.match(key))) or "nothing else"
        raise ValueError(
            f"{self.source} launch: environment variable {' or '.join(names)} is missing (set: {beside}). "
            f"{advice or self.advice}"
        )

    def number(self, *names: str, default: int | None = None, advice: str = "") -> int:
        if default is not None and not any(self.env.get(name) for name in names):
            return default
        text = self.text(*names, advice=advice)
        if not re.fullmatch(r"-?[0-9]+", text.strip()):
            name = next(name for name in names if self.env.get(name))
            raise ValueError(f"{self.source} launch: {name}={text!r} is not a whole number. {self.advice}")
        return int(text)


_LAUNCH_WORD = re.compile(r"(RANK|WORLD_SIZE|LOCAL_|MASTER_|SLURM_(PROCID|N|LOCALID|STEP)|OMPI_COMM|PMI_|MPI_LOCAL)")


def _torchrun(given: Variables) -> Launch:
    world_size = given.number("WORLD_SIZE")
    rank = given.number("RANK")
    alone = world_size == 1  # no rendezvous, so no address is needed
    has_own = bool(given.env.get("LOCAL_WORLD_SIZE"))
    local_world_size = given.number("LOCAL_WORLD_SIZE") if has_own else _deepspeed_local_size(given, world_size)
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=given.number("LOCAL_RANK", default=rank % max(1, local_world_size)),
        local_world_size=local_world_size,
        address=SINGLE.address if alone and not given.env.get("MASTER_ADDR") else given.text("MASTER_ADDR"),
        port=given.number("MASTER_PORT", default=_DEFAULT_PORT if alone else None),
        source=given.source,
    )


def _deepspeed_local_size(given: Variables, world_size: int) -> int:
    """LOCAL_SIZE of DeepSpeed's launcher; world_size if it is from another launch, with more processes than ranks."""
    size = given.number("LOCAL_SIZE", default=world_size)
    return size if size <= world_size else world_size


def _slurm(given: Variables) -> Launch:
    world_size = given.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    local_world_size = _slurm_local_size(given, world_size)
    job = given.number("SLURM_JOB_ID", "SLURM_JOBID", default=0)
    alone = world_size == 1
    return Launch(
        rank=given.number("SLURM_PROCID"),
        world_size=world_size,
        local_rank=given.number("SLURM_LOCALID", default=0 if alone else None),
        local_world_size=local_world_size,
        address=SINGLE.address if alone else _slurm_address(given),
        port=given.number("MASTER_PORT", default=_job_port(job)),
        source=given.source,
    )


def _slurm_address(given: Variables) -> str:
    if given.env.get("MASTER_ADDR"):
        return given.env["MASTER_ADDR"]
    return first_host(given.text("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"))


def _slurm_local_size(given: Variables, world_size: int) -> int:
    """Tasks on this node, from SLURM's run-length list such as "4(x2),3"."""
    counts: list[int] = []
    listed = given.env.get("SLURM_STEP_TASKS_PER_NODE") or given.env.get("SLURM_TASKS_PER_NODE", "")
    for count, repeat in re.findall(r"([0-9]+)(?:\(x([0-9]+)\))?", listed):
        counts += [int(count)] * int(repeat or 1)
    node = given.number("SLURM_NODEID", default=0)
    if node < len(counts):
        return min(counts[node], world_size)
    return min(given.number("SLURM_NTASKS_PER_NODE", default=world_size), world_size)


def first_host(node_list: str) -> str:
    """First host of SLURM's compressed list: "gpu[007-010,12],cpu1" starts with gpu007."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", node_list.strip())
    if match is None:
        raise ValueError(f"slurm launch: node list {node_list!r} has no first host; set MASTER_ADDR.")
    return "".join(part or "" for part in match.groups())


def _job_port(job: int) -> int:
    """Port below the ephemeral range, equal on every rank of a job."""
    return 15000 + job % 15000


def _open_mpi(given: Variables) -> Launch:
    world_size = given.number("OMPI_COMM_WORLD_SIZE")
    rank = given.number("OMPI_COMM_WORLD_RANK")
    local_world_size = given.number("OMPI_COMM_WORLD_LOCAL_SIZE", default=world_size)
    local_rank = given.number("OMPI_COMM_WORLD_LOCAL_RANK", default=rank % max(1, local_world_size))
    return _mpi(given, rank, world_size, local_rank, local_world_size)


def _pmi(given: Variables) -> Launch:
    world_size = given.number("PMI_SIZE")
    rank = given.number("PMI_RANK")
    local_world_size = given.number("MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", default=world_size)
    local_rank = given.number("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", default=rank % max(1, local_world_size))
    return _mpi(given, rank, world_size, local_rank, local_world_size)


def _mpi(given: Variables, rank: int, world_size: int, local_rank: int, local_world_size: int) -> Launch:
    on_this_machine = local_world_size == world_size and not given.env.get("MASTER_ADDR")
    advice = "Export the host name of rank 0 to all ranks, for example mpirun -x MASTER_ADDR=$(hostname)."
    name = given.env.get("PMIX_NAMESPACE") or given.env.get("OMPI_MCA_ess_base_jobid") or ""
    own_port = _job_port(zlib.crc32(name.encode())) if name else _DEFAULT_PORT
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        address=SINGLE.address if on_this_machine else given.text("MASTER_ADDR", advice=advice),
        port=given.number("MASTER_PORT", default=own_port),
        source=given.source,
    )


def _pmi_contradicts_slurm(env: Mapping[str, str]) -> bool:
    """True if mpiexec started this process inside a SLURM task whose variables it merely inherited."""
    pairs = (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_NTASKS"))
    return any(ours in env and theirs in env and env[ours] != env[theirs] for ours, theirs in pairs)
