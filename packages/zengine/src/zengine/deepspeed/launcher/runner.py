"""`deepspeed.launcher.runner`: the command `deepspeed`.

    python -m zengine.deepspeed.launcher.runner --num_gpus 2 train.py --deepspeed --deepspeed_config ds.json

On one host it starts `launcher.launch`, which starts the ranks; on several, a launcher of multinode_runner.py does
that.  Inside `python -m zengine.as_deepspeed`, and where `deepspeed/bin` is on the PATH, the command is called
`deepspeed`, as in DeepSpeed's documentation.

Rejected: a console script of that name.  Installing zengine beside DeepSpeed would replace DeepSpeed's command.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from zengine.deepspeed.accelerator import get_accelerator
from zengine.deepspeed.launcher.constants import (
    IMPI_LAUNCHER,
    MPICH_LAUNCHER,
    MVAPICH_LAUNCHER,
    OPENMPI_LAUNCHER,
    PDSH_LAUNCHER,
    PDSH_MAX_FAN_OUT,
    SLURM_LAUNCHER,
)
from zengine.deepspeed.launcher.hosts import (
    apply_num_nodes_and_gpus,
    encode_world_info,
    fetch_hostfile,
    parse_hostfile,
    parse_inclusion_exclusion,
    parse_node_config,
    parse_node_config_list,
    parse_resource_filter,
)
from zengine.deepspeed.launcher.multinode_runner import (
    IMPIRunner,
    MPICHRunner,
    MultiNodeRunner,
    MVAPICHRunner,
    OpenMPIRunner,
    PDSHRunner,
    SlurmRunner,
    launch_options,
)
from zengine.deepspeed.launcher.options import DLTS_HOSTFILE, parse_runner_args
from zengine.deepspeed.utils.logging import logger, set_log_level

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "DEEPSPEED_ENVIRONMENT_PATHS",
    "DLTS_HOSTFILE",
    "EXPORT_ENVS",
    "LAUNCHER_CLASSES",
    "PDSH_MAX_FAN_OUT",
    "apply_num_nodes_and_gpus",
    "encode_world_info",
    "fetch_hostfile",
    "main",
    "parse_args",
    "parse_inclusion_exclusion",
    "parse_node_config",
    "parse_node_config_list",
    "parse_resource_filter",
]

EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX", "NCCL"]  # variables that other hosts get begin with these
DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")  # lines NAME=value: more of them
DEEPSPEED_ENVIRONMENT_PATHS = [os.path.expanduser("~"), "."]
LAUNCHER_CLASSES: dict[str, type[MultiNodeRunner]] = {
    PDSH_LAUNCHER: PDSHRunner,
    OPENMPI_LAUNCHER: OpenMPIRunner,
    MPICH_LAUNCHER: MPICHRunner,
    IMPI_LAUNCHER: IMPIRunner,
    MVAPICH_LAUNCHER: MVAPICHRunner,
    SLURM_LAUNCHER: SlurmRunner,
}
_VISIBLE = "CUDA_VISIBLE_DEVICES"

_parse_hostfile = parse_hostfile  # DeepSpeed's name


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command."""
    return parse_runner_args(args)


def main(args: Sequence[str] | None = None) -> None:
    """Start a script on the selected devices; exits with the status of the ranks if they fail.

    Raises:
        ValueError: options that exclude each other, or a host, device or launcher that there is not.
        RuntimeError: a host that ssh does not reach, or a launcher that is not installed.
        ConfigError: --autotuning with a wrong section of the config.
    """
    given = parse_args(args)
    set_log_level("error" if given.quiet else given.log_level)
    pool = _read_pool(given)
    active = parse_inclusion_exclusion(pool or _this_host(given), given.include, given.exclude)
    if pool:
        _ask_first_host(given, next(iter(active)))
    active = apply_num_nodes_and_gpus(active, given.num_nodes, given.num_gpus)
    chosen = LAUNCHER_CLASSES.get(given.launcher.lower())
    if chosen is not None:
        chosen.validate_active_resources(active)
    if given.no_ssh and not 0 <= given.node_rank < len(active):
        raise ValueError(
            f"--no_ssh needs --node_rank between 0 and {len(active) - 1}, the index of this host; got "
            f"{given.node_rank}"
        )
    if given.autotuning:
        from zengine.deepspeed.autotuning.autotuner import run_autotuning  # late: it uses this command

        status = run_autotuning(given, active)
    elif given.no_ssh or not (given.force_multi or len(active) > 1):
        status = _run(_launch_command(given, active), dict(os.environ))
    else:
        status = _run_on_hosts(given, active, pool or {host: len(slots) for host, slots in active.items()})
    if status:
        sys.exit(status)


def _read_pool(given: argparse.Namespace) -> OrderedDict[str, int] | None:
    """Return the hosts of the file, if there is one; without it CUDA_VISIBLE_DEVICES becomes a filter."""
    pool = fetch_hostfile(given.hostfile)
    visible = os.environ.get(_VISIBLE, "")
    if not pool and visible:
        if given.include or given.exclude or given.num_nodes > 1 or given.num_gpus > 0:
            logger.warning("%s=%s is ignored: the options select the devices.", _VISIBLE, visible)
        else:
            given.include = f"localhost:{visible}"
        del os.environ[_VISIBLE]
    if (given.num_nodes >= 0 or given.num_gpus >= 0) and (given.include or given.exclude):
        raise ValueError("Cannot specify num_nodes/gpus with include/exclude")
    if not pool and given.num_nodes > 1:
        raise ValueError("Num nodes is >1 but no extra nodes available via hostfile")
    return pool


def _this_host(given: argparse.Namespace) -> dict[str, int]:
    count = get_accelerator().device_count()
    if count == 0:
        raise RuntimeError("Unable to proceed, no GPU resources available. Set DS_ACCELERATOR=cpu for CPU ranks.")
    given.master_addr = given.master_addr or "127.0.0.1"
    return {"localhost": count}


def _ask_first_host(given: argparse.Namespace, host: str) -> None:
    """Check that ssh reaches the first host, and ask for its address if the options do not have it."""
    port = [] if given.ssh_port is None else ["-p", str(given.ssh_port)]
    if not given.no_ssh_check and not given.no_ssh:
        line = ["ssh", "-o", "PasswordAuthentication=no", *port, host, "hostname"]
        if _status(line) != 0:
            raise RuntimeError(
                f"Using hostfile at {given.hostfile} but host={host} was not reachable via ssh. If you are running "
                f"with a single node please remove {given.hostfile} or setup passwordless ssh."
            )
    if not given.master_addr:
        try:
            found = subprocess.check_output(["ssh", *port, host, "hostname", "-I"], text=True).split()
        except (OSError, subprocess.CalledProcessError):
            found = []
        if not found:
            raise RuntimeError(f"Unable to detect the address of {host} via `hostname -I`: pass --master_addr")
        given.master_addr = found[0]
        logger.info("Using IP address of %s for node %s", given.master_addr, host)


def _status(line: Sequence[str]) -> int:
    try:
        return subprocess.call(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError:
        return 127


def _launch_command(given: argparse.Namespace, active: Mapping[str, list[int]]) -> list[str]:
    """Return the command that starts the ranks of this host."""
    return [
        *(sys.executable, "-u", "-m", "zengine.deepspeed.launcher.launch"),
        f"--world_info={encode_world_info(active)}",
        *(f"--master_addr={given.master_addr}", f"--master_port={given.master_port}"),
        *([f"--node_rank={given.node_rank}"] if given.no_ssh else []),
        *(*launch_options(given), given.user_script, *given.user_args),
    ]


def _run_on_hosts(given: argparse.Namespace, active: Mapping[str, list[int]], pool: Mapping[str, int]) -> int:
    given.launcher = given.launcher.lower()
    if given.launcher not in LAUNCHER_CLASSES:
        raise ValueError(f"Unknown launcher {given.launcher}; give one of {', '.join(LAUNCHER_CLASSES)}")
    runner: Any = LAUNCHER_CLASSES[given.launcher](given, encode_world_info(active), pool)
    if not runner.backend_exists():
        raise RuntimeError(f"launcher '{given.launcher}' not installed.")
    environment = dict(os.environ)
    paths = [os.path.abspath("."), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    for name, value in {**environment, **_environment_files()}.items():
        if name.startswith(tuple(EXPORT_ENVS)) or name not in environment:
            runner.add_export(name, value)
    if given.launcher != PDSH_LAUNCHER:
        return _run(runner.get_cmd(environment, active), environment)
    command, kill, environment = runner.get_cmd(environment, active)
    return _run(command, environment, lambda: subprocess.call(kill, env=environment))


def _environment_files() -> dict[str, str]:
    """Return the variables of the files .deepspeed_env of the home folder and of this one."""
    found: dict[str, str] = {}
    for folder in DEEPSPEED_ENVIRONMENT_PATHS:
        path = Path(folder, DEEPSPEED_ENVIRONMENT_NAME)
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        found.update((name.strip(), value) for name, _, value in (line.partition("=") for line in lines) if name)
    return found


def _run(command: Sequence[str], environment: Mapping[str, str], end: Callable[[], Any] = lambda: None) -> int:
    """Run a command and return its status; SIGINT and SIGTERM are passed on, then `end` is called."""
    logger.info("cmd = %s", shlex.join(command))
    process = subprocess.Popen(command, env=environment)

    def stop(number: int, frame: FrameType | None) -> None:
        process.send_signal(signal.SIGTERM)
        end()
        process.wait()
        sys.exit(1)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    main()
