"""`deepspeed.launcher.multinode_runner`: the command of each launcher that reaches several hosts.

Scripts run through `zengine.as_deepspeed`, so that `import deepspeed` in them means zengine; programs
(`--no_python`) run as they are.  pdsh starts `launcher.launch` on each host; the others start the ranks.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from shlex import split
from typing import Any

from zengine.deepspeed.accelerator import get_accelerator
from zengine.deepspeed.launcher.constants import MVAPICH_TMP_HOSTFILE, PDSH_MAX_FAN_OUT
from zengine.deepspeed.utils.logging import logger
from zengine.deepspeed.utils.numa import get_numactl_cmd

__all__ = [
    "IMPIRunner",
    "MPICHRunner",
    "MVAPICHRunner",
    "MultiNodeRunner",
    "OpenMPIRunner",
    "PDSHRunner",
    "SlurmRunner",
]

Devices = Mapping[str, Any]  # of each host: numbers, or how many
_UNSAFE = re.compile(r"[^\w@%+=:,./-]")  # a value with one of these is quoted


class MultiNodeRunner(ABC):
    """One launcher.  args: of `runner.parse_args`; resource_pool: number of devices of each host of the file."""

    def __init__(
        self, args: argparse.Namespace, world_info_base64: str, resource_pool: Mapping[str, Any] | None = None
    ) -> None:
        self.args = args
        self.resource_pool = {} if resource_pool is None else resource_pool
        self.validate_args()
        self.user_arguments = self.parse_user_args()
        self.user_script = args.user_script
        self.world_info_base64 = world_info_base64
        self.exports: dict[str, str] = {}

    @abstractmethod
    def backend_exists(self) -> Any:
        """Return something true if the launcher is installed."""

    @abstractmethod
    def get_cmd(self, environment: dict[str, str], active_resources: Devices) -> Any:
        """Return the command."""

    @property
    def name(self) -> str:
        """Name of the launcher."""
        return type(self).__name__

    def add_export(self, key: str, var: str) -> None:
        """Set an environment variable on all hosts."""
        var = var.strip()
        self.exports[key.strip()] = f'"{var}"' if _UNSAFE.search(var) else var

    def parse_user_args(self) -> list[str]:
        """Return the arguments of the script."""
        return list(self.args.user_args)

    def validate_args(self) -> None:  # noqa: B027  # pdsh and srun have all of them
        """Raise ValueError for options that the launcher does not have."""

    @classmethod
    def validate_active_resources(cls, active_resources: Devices) -> None:
        """Raise ValueError for devices that the launcher cannot select, or none."""
        if not active_resources:
            raise ValueError("the filter selects no device; change --include or --exclude")

    def _script(self) -> list[str]:
        """Return the command of a rank."""
        python = [] if self.args.no_python else [sys.executable, "-u", "-m", "zengine.as_deepspeed"]
        module = ["-m"] if self.args.module and not self.args.no_python else []
        return [*python, *module, str(self.user_script), *self.user_arguments]

    def _exported(self, option: str) -> list[str]:
        return [word for key, value in self.exports.items() for word in (option, f"{key}={value}")]


class _WholeHosts(MultiNodeRunner):
    """A launcher that takes all devices of all hosts of the file."""

    def validate_args(self) -> None:
        """Raise ValueError for filters."""
        if self.args.include != "" or self.args.exclude != "":
            raise ValueError(f"{self.name} backend does not support worker include/exclusion")
        if self.args.num_nodes != -1 or self.args.num_gpus != -1:
            raise ValueError(f"{self.name} backend does not support limiting num nodes/gpus")

    def _per_host(self) -> int:
        """Return the devices of each host.  Raises ValueError if they differ."""
        counts = set(self.resource_pool.values())
        if len(counts) != 1:
            raise ValueError(f"{self.name} requires same number of devices per node, not {dict(self.resource_pool)}")
        return int(counts.pop())

    def _total(self) -> int:
        return int(sum(self.resource_pool.values()))

    def _world(self, per_host: int) -> dict[str, str]:
        """Return the variables that MPI does not set."""
        return {
            "MASTER_ADDR": str(self.args.master_addr),
            "MASTER_PORT": str(self.args.master_port),
            "WORLD_SIZE": str(self._total()),
            "LOCAL_SIZE": str(per_host),
        }


class PDSHRunner(MultiNodeRunner):
    """pdsh: ssh to many hosts at once."""

    def backend_exists(self) -> Any:
        """Return the path of pdsh."""
        return shutil.which("pdsh")

    @property
    def name(self) -> str:
        """Name of the launcher."""
        return "pdsh"

    def parse_user_args(self) -> list[str]:
        """Return the arguments of the script, quoted for the remote shell if they have spaces."""
        return ['"{}"'.format(arg.replace('"', '\\"')) if " " in arg else arg for arg in self.args.user_args]

    def get_cmd(
        self, environment: dict[str, str], active_resources: Devices
    ) -> tuple[list[str], list[str], dict[str, str]]:
        """Return the command, the one that ends it, and the environment of both."""
        environment["PDSH_RCMD_TYPE"] = "ssh"
        if self.args.ssh_port is not None:
            before = environment.get("PDSH_SSH_ARGS_APPEND", "")
            environment["PDSH_SSH_ARGS_APPEND"] = f"{before} -p {self.args.ssh_port}"
        workers = ",".join(active_resources)
        logger.info("Running on the following workers: %s", workers)
        pdsh = ["pdsh", "-S", "-f", str(PDSH_MAX_FAN_OUT), "-w", workers, *split(self.args.launcher_args)]
        sourced = [] if self.args.venv_script is None else [f"source {self.args.venv_script};"]
        exports = "".join(f"export {key}={value}; " for key, value in self.exports.items())
        launch = [
            *sourced,
            *(
                exports,
                f"cd {os.path.abspath('.')};",
                sys.executable,
                "-u",
                "-m",
                "zengine.deepspeed.launcher.launch",
            ),
            *(f"--world_info={self.world_info_base64}", "--node_rank=%n"),  # pdsh replaces %n
            *(f"--master_addr={self.args.master_addr}", f"--master_port={self.args.master_port}"),
            *launch_options(self.args),
        ]
        kill = [*pdsh, "pkill", "-f", f"'launcher[.]launch --world_info={self.world_info_base64}'"]
        return [*pdsh, *launch, str(self.user_script), *self.user_arguments], kill, environment


def launch_options(args: argparse.Namespace) -> list[str]:
    """Return the options of `runner` that `launch` has, too."""
    names = ("no_python", "module", "no_local_rank", "bind_cores_to_rank", "quiet")
    found = [f"--{name}" for name in names if getattr(args, name)]
    if args.save_pid:
        found += ["--save_pid", f"{os.getpid()}"]
    if args.bind_core_list is not None:
        found.append(f"--bind_core_list={args.bind_core_list}")
    return [*found, f"--enable_each_rank_log={args.enable_each_rank_log}", f"--log_level={args.log_level}"]


class OpenMPIRunner(_WholeHosts):
    """Open MPI's mpirun."""

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Mapping[str, Any]) -> None:
        super().__init__(args, world_info_base64, resource_pool)
        self.add_export("UCX_TLS", "tcp")

    def backend_exists(self) -> Any:
        """Return the path of ompi_info."""
        return shutil.which("ompi_info")

    @property
    def name(self) -> str:
        """Name of the launcher."""
        return "openmpi"

    def get_cmd(self, environment: dict[str, str], active_resources: Devices) -> list[str]:
        """Return the command; over eth0 unless --launcher_args names another network."""
        given = split(self.args.launcher_args)
        pairs = pairwise(given)
        is_given = any(option.lstrip("-") == "mca" and value == "btl_tcp_if_include" for option, value in pairs)
        network = [] if is_given else ["--mca", "btl_tcp_if_include", "eth0"]
        return [
            *("mpirun", "-n", str(self._total()), "-hostfile", str(self.args.hostfile)),
            *("--mca", "btl", "^openib", *network, *given),
            *self._exported("-x"),
            *self._script(),
        ]


class MPICHRunner(_WholeHosts):
    """MPICH's mpirun."""

    def backend_exists(self) -> Any:
        """Return the path of mpirun."""
        return shutil.which("mpirun")

    @property
    def name(self) -> str:
        """Name of the launcher."""
        return "mpich"

    def get_cmd(self, environment: dict[str, str], active_resources: Devices) -> list[str]:
        """Return the command; `launcher_helper` takes the rank from MPICH's variables."""
        per_host = self._per_host()
        world = [word for item in self._world(per_host).items() for word in ("-genv", *item)]
        switches = [f"--{name}" for name in ("module", "no_python") if getattr(self.args, name)]
        return [
            *("mpirun", "-n", str(self._total()), "-ppn", str(per_host), *split(self.args.launcher_args)),
            *self._exported("-genv"),
            *(*world, "-hosts", ",".join(self.resource_pool)),
            *(sys.executable, "-u", "-m", "zengine.deepspeed.launcher.launcher_helper"),
            *("--launcher", self.args.launcher if self.args.launcher != "pdsh" else self.name, *switches),
            *(str(self.user_script), *self.user_arguments),
        ]


class IMPIRunner(_WholeHosts):
    """Intel MPI's mpirun: a part of the command for each rank."""

    def backend_exists(self) -> Any:
        """Return the path of mpirun."""
        return shutil.which("mpirun")

    @property
    def name(self) -> str:
        """Name of the launcher."""
        return "impi"

    def get_cmd(self, environment: dict[str, str], active_resources: Devices) -> list[str]:
        """Return the command, with numactl before each rank for --bind_cores_to_rank."""
        per_host, binds = self._per_host(), self.args.bind_cores_to_rank
        shared = {**self.exports, **self._world(per_host), "I_MPI_PIN": "0"}  # MPI does not bind to cores
        if binds:
            shared["OMP_NUM_THREADS"] = str(get_numactl_cmd(self.args.bind_core_list, per_host, 0)[0])
        ranks: list[str] = []
        for rank in range(self._total()):
            local = rank % per_host
            numactl = get_numactl_cmd(self.args.bind_core_list, per_host, local)[1] if binds else []
            variables = ["-env", "RANK", str(rank), "-env", "LOCAL_RANK", str(local)]
            ranks += [*([":"] if rank else []), "-n", "1", *variables, *numactl, *self._script()]
        return [
            *("mpirun", "-ppn", str(per_host), *split(self.args.launcher_args)),
            *(word for item in shared.items() for word in ("-genv", *item)),
            *("-hosts", ",".join(self.resource_pool), *ranks),
        ]


class SlurmRunner(MultiNodeRunner):
    """SLURM's srun."""

    def backend_exists(self) -> Any:
        """Return the path of sinfo."""
        return shutil.which("sinfo")

    @property
    def name(self) -> str:
        """Name of the launcher."""
        return "slurm"

    @classmethod
    def validate_active_resources(cls, active_resources: Devices) -> None:
        """Raise ValueError unless every host has the same number of devices, counted from 0."""
        for host, devices in active_resources.items():
            if list(devices) != list(range(len(devices))):
                raise ValueError(
                    f"slurm backend cannot select specific device ids, got {list(devices)} on {host}. Filter whole "
                    "hosts, or keep the first N slots on every host."
                )
        counts = {host: len(devices) for host, devices in active_resources.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"slurm backend needs the same slot count on every host, got {counts}.")

    def get_cmd(self, environment: dict[str, str], active_resources: Devices) -> list[str]:
        """Return the command.  Raises ValueError for devices that srun cannot select."""
        self.validate_active_resources(active_resources)
        args = self.args
        line = ["srun", "-n", str(sum(map(len, active_resources.values()))), *split(args.launcher_args)]
        if getattr(args, "slurm_comment", ""):
            line += ["--comment", args.slurm_comment]
        if args.include != "" or args.exclude != "":
            line += ["--nodelist", ",".join(active_resources), "--nodes", str(len(active_resources))]
        if args.num_nodes > 0:
            line += ["--nodes", str(args.num_nodes)]
        if args.num_gpus > 0:
            line += ["--gpus-per-node", str(args.num_gpus)]
        exports = "".join(f",{key}={value}" for key, value in self.exports.items())
        return [*line, f"--export=ALL{exports}", *self._script()]


class MVAPICHRunner(_WholeHosts):
    """MVAPICH's mpirun."""

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Mapping[str, Any]) -> None:
        super().__init__(args, world_info_base64, resource_pool)
        settings = {
            "MV2_SMP_USE_CMA": "0",  # the kernel module is absent on Ubuntu
            "MV2_DEBUG_SHOW_BACKTRACE": "1",
            "MV2_SUPPORT_DL": "1",
            "MV2_ENABLE_AFFINITY": "0",  # for MPI_THREAD_MULTIPLE
            "MV2_INTER_ALLGATHER_TUNING": "5",
            "MV2_CUDA_USE_NAIVE": "0",
        }
        if get_accelerator().device_name() == "cuda":
            settings["MV2_USE_CUDA"] = "1"
        for key, value in settings.items():
            self.add_export(key, value)

    def backend_exists(self) -> Any:
        """Return True if mpiname reports MVAPICH2-GDR; warns otherwise."""
        if shutil.which("mpiname") is None:
            warnings.warn("mpiname does not exist, mvapich is not installed properly", stacklevel=2)
            return False
        found = subprocess.check_output(["mpiname"], text=True).strip()
        if "MVAPICH2-GDR" not in found:
            warnings.warn(f"Expected MVAPICH2-GDR as return for mpiname but received {found}", stacklevel=2)
        return "MVAPICH2-GDR" in found

    @property
    def name(self) -> str:
        """Name of the launcher."""
        return "mvapich"

    def get_cmd(self, environment: dict[str, str], active_resources: Devices) -> list[str]:
        """Return the command, and write its hostfile."""
        per_host = self._per_host()
        Path(MVAPICH_TMP_HOSTFILE).write_text("".join(f"{host}\n" for host in self.resource_pool), encoding="utf-8")
        return [
            *("mpirun", "-np", str(self._total()), "-ppn", str(per_host), "--hostfile", MVAPICH_TMP_HOSTFILE),
            *(*split(self.args.launcher_args), *self._exported("-env"), *self._script()),
        ]


LAUNCHERS: Sequence[type[MultiNodeRunner]] = (
    PDSHRunner,
    OpenMPIRunner,
    MPICHRunner,
    IMPIRunner,
    MVAPICHRunner,
    SlurmRunner,
)
