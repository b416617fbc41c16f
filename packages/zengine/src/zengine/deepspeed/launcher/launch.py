"""`deepspeed.launcher.launch`: starts the ranks of one host, and ends all if one fails.

Each rank runs `python -u -m zengine.as_deepspeed script --local_rank=N ...`, so that `import deepspeed` in the script
means zengine.  It has RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_SIZE, LOCAL_WORLD_SIZE,
CROSS_RANK, CROSS_SIZE and, with GPUs, CUDA_VISIBLE_DEVICES in its environment.  The exit status is that of the first
rank that fails.

Rejected: torchrun below.  It replaces the exit status, and scripts of DeepSpeed expect `--local_rank`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import attrs

from zengine.deepspeed.accelerator import get_accelerator
from zengine.deepspeed.launcher.hosts import decode_world_info
from zengine.deepspeed.launcher.options import parse_launch_args
from zengine.deepspeed.utils.logging import logger, set_log_level
from zengine.deepspeed.utils.numa import parse_range_list

__all__ = ["main", "parse_args", "rank_command", "rank_environments", "run_ranks"]

PID_FILE_BASEPATH = "/tmp"
_POLL_S = 0.05  # between two looks at the processes
_GRACE_S = 30.0  # from SIGTERM to SIGKILL


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of this module's command line."""
    return parse_launch_args(args)


def rank_environments(
    world: Mapping[str, Sequence[int]], args: argparse.Namespace, environ: Mapping[str, str]
) -> list[dict[str, str]]:
    """Return the environment of each rank of host number `args.node_rank`."""
    hosts = list(world)
    own = list(world[hosts[args.node_rank]])
    first = sum(len(world[host]) for host in hosts[: args.node_rank])
    shared = {
        **environ,
        "MASTER_ADDR": args.master_addr,
        "MASTER_PORT": str(args.master_port),
        "WORLD_SIZE": str(sum(map(len, world.values()))),
        "CROSS_RANK": str(args.node_rank),
        "CROSS_SIZE": str(len(hosts)),
        "LOCAL_SIZE": str(len(own)),
        "LOCAL_WORLD_SIZE": str(len(own)),
    }
    if get_accelerator().device_name() == "cuda":
        shared["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, own))
    found = [{**shared, "RANK": str(first + local), "LOCAL_RANK": str(local)} for local in range(len(own))]
    if args.bind_cores_to_rank:
        share = len(_cores(args)) // len(own)
        found = [{**each, "OMP_NUM_THREADS": str(max(1, share))} for each in found]
    return found


def rank_command(args: argparse.Namespace, local_rank: int) -> list[str]:
    """Return the command of a rank.  Raises ValueError for --no_python with --module."""
    if args.no_python and args.module:
        raise ValueError("Don't use both the '--no_python' flag and the '--module' flag at the same time.")
    python = [] if args.no_python else [sys.executable, "-u", "-m", "zengine.as_deepspeed"]
    own = [] if args.no_local_rank else [f"--local_rank={local_rank}"]
    return [*python, *(["-m"] if args.module else []), args.training_script, *own, *args.training_script_args]


@attrs.define(eq=False)
class Ranks:
    """Running ranks of this host."""

    processes: list[subprocess.Popen[bytes]] = attrs.field(factory=list)

    def wait(self) -> int:
        """Return 0 when all have ended well; end the others and return the status of the first that fails."""
        running = list(self.processes)
        while running:
            for process in list(running):
                status = process.poll()
                if status:
                    logger.error("process %d exits with return code = %d", process.pid, status)
                    self.stop()
                    return status if status > 0 else 128 - status  # a signal, as shells have it
                if status == 0:
                    running.remove(process)
            time.sleep(_POLL_S)
        return 0

    def stop(self) -> None:
        """End all processes with their children."""
        for process in self.processes:
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal(process, signal.SIGKILL)
                process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the session of a process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def run_ranks(args: argparse.Namespace) -> int:
    """Start the ranks and wait for them; return the exit status.  SIGINT and SIGTERM end them."""
    world, ranks = decode_world_info(args.world_info), Ranks()
    environments = rank_environments(world, args, os.environ)

    def end(number: int, frame: FrameType | None) -> None:
        logger.info("Main process received %s, exiting", signal.Signals(number).name)
        ranks.stop()
        sys.exit(1)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for local_rank, environment in enumerate(environments):
            ranks.processes.append(_start(args, local_rank, environment, len(environments)))
        return ranks.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(
    args: argparse.Namespace, local_rank: int, environment: dict[str, str], local_size: int
) -> subprocess.Popen[bytes]:
    command = rank_command(args, local_rank)
    output = _log_file(args, environment["RANK"])
    before = os.sched_getaffinity(0)
    if args.bind_cores_to_rank:  # a child inherits the cores
        cores = _cores(args)
        share = len(cores) // local_size
        assert share >= 1, "At least one core needs to be assigned to each rank"
        os.sched_setaffinity(0, cores[share * local_rank : share * (local_rank + 1)])
    try:
        file = None if output is None else output.open("wb")
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=file,
            stderr=None if file is None else subprocess.STDOUT,
            start_new_session=True,
        )
    finally:
        os.sched_setaffinity(0, before)
        if output is not None and file is not None:
            file.close()
    logger.info("process %d spawned with command: %s", process.pid, command)
    return process


def _cores(args: argparse.Namespace) -> list[int]:
    return parse_range_list(args.bind_core_list) if args.bind_core_list else sorted(os.sched_getaffinity(0))


def _log_file(args: argparse.Namespace, rank: str) -> Path | None:
    """Return the file of a rank's output.  Raises ValueError if the folder is a file."""
    if args.enable_each_rank_log == "None":
        return None
    folder = Path(args.enable_each_rank_log)
    if folder.is_file():
        raise ValueError(f"{folder} should not be a file, it should be a directory.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{time.strftime('%Y%m%d%H%M%S')}_rank{rank}.log"


def main(args: Sequence[str] | None = None) -> None:
    """Start the ranks of this host; exits with their status."""
    found = parse_args(args)
    set_log_level("error" if found.quiet else found.log_level)
    if found.save_pid:
        pid_file = Path(PID_FILE_BASEPATH, f"{found.save_pid}.deepspeed")
        assert not pid_file.exists(), f"{pid_file} exists but shouldn't"
        pid_file.write_text(str(os.getpid()), encoding="ascii")
        print(f"launcher pid: {os.getpid()}", flush=True)
        try:
            sys.exit(run_ranks(found))
        finally:
            pid_file.unlink(missing_ok=True)
    sys.exit(run_ranks(found))


if __name__ == "__main__":
    main()
