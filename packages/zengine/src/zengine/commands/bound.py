"""`python -m zengine.commands.bound script.py ...`: bind this process to its cores, then run the script.

torchrun starts it in each process.  The available cores are split into LOCAL_WORLD_SIZE runs of adjacent cores; this
process is bound to run number LOCAL_RANK.  Adjacent cores share caches and, mostly, the memory of one socket.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterable, Mapping

__all__ = ["cores_of", "main"]


def cores_of(available: Iterable[int], rank: int, size: int) -> list[int]:
    """Return the cores of process `rank` of `size`: adjacent, equally many for each, at least one."""
    cores = sorted(available)
    share = len(cores) // size
    if share == 0:
        return [cores[rank % len(cores)]]
    return cores[rank * share : (rank + 1) * share]


def bind(environ: Mapping[str, str]) -> list[int]:
    """Bind this process and return its cores."""
    own = cores_of(
        os.sched_getaffinity(0), int(environ.get("LOCAL_RANK", "0")), int(environ.get("LOCAL_WORLD_SIZE", "1"))
    )
    os.sched_setaffinity(0, own)
    return own


def main(argv: list[str]) -> None:
    """Bind this process and run the script."""
    own = bind(os.environ)
    os.environ["OMP_NUM_THREADS"] = str(len(own))
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
