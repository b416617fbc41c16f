"""Options of the command `deepspeed` and of the process that starts the ranks of a host.

Names and defaults are DeepSpeed's; `--log_level` and `--quiet` apply to the launcher's own lines.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from zengine.deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from zengine.deepspeed.launcher.constants import PDSH_LAUNCHER

__all__ = ["DLTS_HOSTFILE", "parse_launch_args", "parse_runner_args"]

DLTS_HOSTFILE = "/job/hostfile"
_LEVELS = ("debug", "info", "warning", "error", "critical")


def parse_runner_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of `deepspeed`; exits with a message for wrong ones."""
    parser = argparse.ArgumentParser(
        prog="deepspeed",
        description="Start a script on the devices of one host, or of the hosts of a hostfile.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("-H", "--hostfile", default=DLTS_HOSTFILE, help='lines "worker-0 slots=4"; without the file: this host')
    add("-i", "--include", default="", help='hosts and devices to use: "worker-0@worker-1:0,2"')
    add("-e", "--exclude", default="", help="hosts and devices to leave out, likewise")
    add("--num_nodes", type=int, default=-1, help="use the first hosts of the file only")
    add("--num_gpus", "--num_accelerators", type=int, default=-1, help="devices on each host, from 0")
    add("--master_port", type=int, default=TORCH_DISTRIBUTED_DEFAULT_PORT, help="port of the rendezvous")
    add("--master_addr", default="", help="address of the first host; default: asked with `hostname -I`")
    add("--node_rank", type=int, default=-1, help="with --no_ssh: index of this host")
    add("--launcher", default=PDSH_LAUNCHER, help="pdsh, openmpi, mpich, impi, slurm or mvapich")
    add("--launcher_args", default="", help="arguments of the launcher, in one string")
    add("--no_ssh", action="store_true", help="start the ranks of this host only; run it on each host")
    add("--no_ssh_check", action="store_true", help="do not try ssh before the launch")
    add("--force_multi", action="store_true", help="use the launcher for one host, too")
    add("--autotuning", default="", choices=["tune", "run"], help="find the best config; run: train with it")
    add("--ssh_port", type=int, default=None, help="port of ssh")
    add("--venv_script", default=None, help="script to source on each host first")
    _add_common(parser)
    add("--save_pid", action="store_true", help="write the launcher's process number to /tmp/<pid>.deepspeed")
    add("user_script", help="script, module or program to run in each process")
    add("user_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args(args)


def parse_launch_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of `launcher.launch`, which starts the ranks of one host."""
    parser = argparse.ArgumentParser(description="Start the ranks of this host.")
    add = parser.add_argument
    add("--node_rank", type=int, default=0, help="index of this host")
    add("--master_addr", default="127.0.0.1", help="address of the first host")
    add("--master_port", type=int, default=TORCH_DISTRIBUTED_DEFAULT_PORT, help="port of the rendezvous")
    add("--world_info", default="None", help="devices of each host: JSON in base64")
    _add_common(parser)
    add("--save_pid", type=int, default=0, help="process number of the command that was called")
    add("training_script", help="script, module or program to run in each process")
    add("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args(args)


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--module", action="store_true", help="the script is a module, as in python -m")
    add("--no_python", action="store_true", help="the script is a program; Python does not run it")
    add("--no_local_rank", action="store_true", help="do not pass --local_rank to the script")
    add("--enable_each_rank_log", default="None", help="folder for the output of each rank")
    add("--bind_cores_to_rank", action="store_true", help="bind each rank to its own cores")
    add("--bind_core_list", default=None, help='cores to bind to: "0,2-4"; default: all')
    add("--log_level", default="info", choices=_LEVELS, help="of the launcher's own lines")
    add("-q", "--quiet", action="store_true", help="only errors")
