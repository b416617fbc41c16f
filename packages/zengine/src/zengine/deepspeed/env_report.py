"""`deepspeed.env_report`: the ops that are built in, versions and places.

    python -m zengine.deepspeed.env_report

`zengine env` says more: kernels in use, transport between ranks.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch

import zengine
from zengine.deepspeed.accelerator.real_accelerator import get_accelerator
from zengine.deepspeed.git_version_info import compatible_ops, installed_ops, torch_info
from zengine.deepspeed.git_version_info import version as deepspeed_version

__all__ = ["cli_main", "debug_report", "get_shm_size", "human_readable_size", "main", "op_report"]

GREEN, RED, YELLOW, END = "\033[92m", "\033[91m", "\033[93m", "\033[0m"
SUCCESS = f"{GREEN} [SUCCESS] {END}"
OKAY = f"{GREEN}[OKAY]{END}"
WARNING = f"{YELLOW}[WARNING]{END}"
FAIL = f"{RED}[FAIL]{END}"
INFO = "[INFO]"
_YES, _NO = f"{GREEN}[YES]{END}", f"{YELLOW}[NO]{END}"
_LEAST_SHM = 512 * 2**20  # bytes


def op_report(verbose: bool = True) -> None:
    """Print a line for each op: whether it is installed, and compatible.  verbose: ignored."""
    print("DeepSpeed's ops in zengine (compiled into its wheels, never at run time)")
    print(f"op name {'.' * 17} installed .. compatible")
    for name, is_compatible in compatible_ops.items():
        installed = _YES if installed_ops[name] else _NO
        print(f"{name} {'.' * (24 - len(name))} {installed} {'.' * 6} {OKAY if is_compatible else _NO}")


def debug_report() -> None:
    """Print versions, install paths and the size of /dev/shm."""
    shm, warnings = get_shm_size()
    rows: list[tuple[str, Any]] = [
        ("torch install path", list(torch.__path__)),
        ("torch version", torch.__version__),
        ("deepspeed install path", [os.path.dirname(__file__)]),
        ("deepspeed info", f"{deepspeed_version}, by zengine {zengine.__version__}"),
        ("accelerator", get_accelerator().device_name()),
        ("torch cuda version", torch_info["cuda_version"]),
        ("shared memory (/dev/shm) size", shm),
    ]
    print("DeepSpeed general environment info:")
    for name, value in rows:
        print(name, "." * (33 - len(name)), value)
    for line in warnings:
        print(line)


def get_shm_size() -> tuple[str, list[str]]:
    """Return the size of /dev/shm as text ("UNKNOWN" if there is none), and warnings if it is small."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return "UNKNOWN", []
    size = found.f_frsize * found.f_blocks
    small = f" {WARNING} /dev/shm is small; in a container, start it with --shm-size=1gb or more"
    return human_readable_size(size), [small] if size < _LEAST_SHM else []


def human_readable_size(size: float) -> str:
    """Format bytes with two decimals in binary units: 1536 gives "1.50 KB"."""
    units = ["B", "KB", "MB", "GB", "TB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.2f} {units[0]}"


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print both reports."""
    if not hide_operator_status:
        op_report(verbose=not hide_errors_and_warnings)
    debug_report()


def cli_main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="ds_report", description="Report the environment.")
    parser.add_argument("--hide_operator_status", action="store_true", help="without the ops")
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help="ignored: there are none")
    main(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    cli_main()
