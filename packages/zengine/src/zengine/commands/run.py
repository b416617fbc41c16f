"""`zengine run train.py --config c.json`: start one process per device with torchrun, on one or several hosts.

torchrun starts, restarts and reaps the processes; this command finds the numbers and execs torchrun, so signals and
the exit status are torchrun's.  It adds:

- `--nproc`: defaults to the visible GPUs, else 1; OMP_NUM_THREADS splits the cores.
- `--bind-cores`: binds each process to its own cores (commands/bound.py).
- `--keep-memory`: on CPUs, memory freed by a step is kept for the next one, as on a GPU.  glibc returns large blocks
  to the system and gets them back page by page, zeroed: a fifth of a step with gradients of many experts.
- `--hostfile`: lines "name slots=8" as in DeepSpeed, filtered by `--include` and `--exclude`.  Prints the command of
  each host and, without `--dry-run`, starts that of this host.  It never logs in to a host: use your scheduler or a
  loop over ssh.
- inside a SLURM allocation, outside a task: prints or starts the `srun` line for the whole job.

Rejected: pdsh, MPI and ssh back-ends, which fail differently on every cluster.
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from zengine.commands import CommandError
from zengine.commands.hosts import Host, parse, select
from zengine.commands.launching import Launch, default_nproc, slurm_line, torchrun_line

KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}  # read by glibc, ignored by others


def run(arguments: argparse.Namespace) -> int:
    """Exec torchrun.  Raises CommandError for invalid hosts or options."""
    lines = commands(arguments, os.environ, socket.gethostname())
    own = next((line for host, line in lines if _is_here(host)), None)
    if arguments.dry_run or own is None or len(lines) > 1:
        for host, line in lines:
            print(f"{host}: {shlex.join(line)}" if host else shlex.join(line))
    if arguments.dry_run:
        return 0
    if own is None:
        hosts = ", ".join(host for host, _ in lines)
        raise CommandError(
            f"this host ({socket.gethostname()}) is not in the hostfile ({hosts}): run the line above on each of "
            "those hosts, or start on one of them"
        )
    sys.stdout.flush()
    environment = {**os.environ, **variables(arguments, os.environ)}
    return os.execvpe(own[0], own, environment)  # does not return


def commands(arguments: argparse.Namespace, environ: Mapping[str, str], here: str) -> list[tuple[str, list[str]]]:
    """Return (host, command) for each host; the host is "" for this machine alone.  Reads the hostfile only."""
    launch = Launch(
        nproc=arguments.nproc or default_nproc(environ),
        port=arguments.master_port,
        max_restarts=arguments.max_restarts,
        binds_cores=arguments.bind_cores,
        script=(*(("-m",) if arguments.module else ()), arguments.script, *arguments.arguments),
    )
    if arguments.hostfile:
        hosts = _hosts(arguments)
        master = arguments.master_addr or hosts[0].name
        return [
            (host.name, torchrun_line(launch, host=host, index=index, num_hosts=len(hosts), master=master))
            for index, host in enumerate(hosts)
        ]
    if arguments.include or arguments.exclude:
        raise CommandError("--include and --exclude filter a --hostfile; on one host set CUDA_VISIBLE_DEVICES")
    if "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ and int(environ.get("SLURM_NNODES", "1")) > 1:
        return [("", slurm_line(launch, environ, arguments.nproc))]
    return [("", torchrun_line(launch))]


def variables(arguments: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables to add for the processes."""
    nproc = arguments.nproc or default_nproc(environ)
    wanted = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // nproc))}
    if arguments.keep_memory:
        wanted |= KEEP_MEMORY
    return {name: value for name, value in wanted.items() if name not in environ}


def _hosts(arguments: argparse.Namespace) -> list[Host]:
    try:
        text = Path(arguments.hostfile).read_text()
    except OSError as error:
        raise CommandError(f"--hostfile {arguments.hostfile}: {error.strerror}") from None
    try:
        return select(parse(text), include=arguments.include, exclude=arguments.exclude)
    except ValueError as error:
        raise CommandError(f"{arguments.hostfile}: {error}") from None


def _is_here(host: str) -> bool:
    """Return True if a name of a hostfile is this machine."""
    return host in ("", "localhost", "127.0.0.1", socket.gethostname(), socket.gethostname().partition(".")[0])
