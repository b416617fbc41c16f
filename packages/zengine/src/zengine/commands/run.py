"""`zengine run train.py --config c.json`: one process a device, by torchrun; several hosts by static commands or
SLURM.

Thin on purpose.  torchrun starts, restarts and reaps processes better than a launcher of ours would, so this finds
the numbers and becomes torchrun (the process is replaced: signals and the exit status are its own).  What it adds:

- `--nproc`: by default the GPUs that CUDA_VISIBLE_DEVICES leaves, else one process; OMP_NUM_THREADS shares out the
cores.
- `--bind-cores`: each process keeps to its own cores (commands/bound.py).
- `--keep-memory`: on CPUs, memory that a step frees waits for the next one, as on a GPU.  glibc hands large pieces
  back to the system, which gives them out again page by page, filled with zeros: with gradients of many experts a
  fifth of a step.
- `--hostfile`: lines "name slots=8", as DeepSpeed has them, with `--include` and `--exclude`.  The command of each
host is
  printed; the one of this host is started, unless `--dry-run`.  Nothing logs in anywhere: your scheduler, or a
  loop over ssh, does.
- inside a SLURM allocation without a task of its own: the `srun` line that starts the whole, started or printed.

Rejected: pdsh, MPI and ssh back-ends (each fails in its own way on each cluster).
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from zengine.commands import CommandError, positive
from zengine.commands.hosts import Host, chosen, parse
from zengine.commands.launching import Launch, of_this_machine, slurm_line, torchrun_line

if TYPE_CHECKING:
    from zengine.commands import Subparsers

KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}  # glibc's; others look away


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("run", help="Start a script on all devices, by torchrun; on several hosts, too.")
    parser.add_argument("--nproc", type=positive, default=0, metavar="N", help="processes here; default: one a GPU")
    parser.add_argument("--bind-cores", action="store_true", help="each process keeps to its own cores")
    parser.add_argument("--keep-memory", action="store_true", help="what a step frees on the CPU waits for the next")
    parser.add_argument("--hostfile", default="", help='lines "name slots=8"')
    parser.add_argument("--include", default="", metavar="HOSTS", help='"a@b:0,2": host a, devices 0 and 2 of b')
    parser.add_argument("--exclude", default="", metavar="HOSTS", help="the same, left out")
    parser.add_argument("--master-addr", default="", help="where ranks meet; default: the first host")
    parser.add_argument("--master-port", type=positive, default=29500)
    parser.add_argument("--max-restarts", type=int, default=0, help="of a run whose process died")
    parser.add_argument("--module", action="store_true", help="the script is a module, as in python -m")
    parser.add_argument("--dry-run", action="store_true", help="print what would be started")
    parser.add_argument("script", help="what to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def run(arguments: argparse.Namespace) -> int:
    """Become torchrun.  Raises CommandError for hosts and numbers that do not fit."""
    lines = commands(arguments, os.environ, socket.gethostname())
    own = next((line for host, line in lines if _is_here(host)), None)
    if arguments.dry_run or own is None or len(lines) > 1:
        for host, line in lines:
            print(f"{host}: {shlex.join(line)}" if host else shlex.join(line))
    if arguments.dry_run:
        return 0
    if own is None:
        raise CommandError(
            f"this host ({socket.gethostname()}) is none of {', '.join(host for host, _ in lines)}: run the line "
            "above on each of them, or start on one of them"
        )
    sys.stdout.flush()
    environment = {**os.environ, **variables(arguments, os.environ)}
    return os.execvpe(own[0], own, environment)  # does not return


def commands(arguments: argparse.Namespace, environ: Mapping[str, str], here: str) -> list[tuple[str, list[str]]]:
    """(host, command) for each host; the host is "" where there is only this one.  Pure but for the hostfile."""
    launch = Launch(
        nproc=arguments.nproc or of_this_machine(environ),
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
        raise CommandError(
            "--include and --exclude choose among the lines of a --hostfile; on one host set CUDA_VISIBLE_DEVICES"
        )
    if "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ and int(environ.get("SLURM_NNODES", "1")) > 1:
        return [("", slurm_line(launch, environ, arguments.nproc))]
    return [("", torchrun_line(launch))]


def variables(arguments: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """What the processes find in their environment beside what was there."""
    nproc = arguments.nproc or of_this_machine(environ)
    wanted = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // nproc))}
    if arguments.keep_memory:
        wanted |= KEEPING
    return {name: value for name, value in wanted.items() if name not in environ}


def _hosts(arguments: argparse.Namespace) -> list[Host]:
    try:
        text = Path(arguments.hostfile).read_text()
    except OSError as error:
        raise CommandError(f"--hostfile {arguments.hostfile}: {error.strerror}") from None
    try:
        return chosen(parse(text), include=arguments.include, exclude=arguments.exclude)
    except ValueError as error:
        raise CommandError(f"{arguments.hostfile}: {error}") from None


def _is_here(host: str) -> bool:
    """Whether a name of a hostfile means this machine."""
    return host in ("", "localhost", "127.0.0.1", socket.gethostname(), socket.gethostname().partition(".")[0])
