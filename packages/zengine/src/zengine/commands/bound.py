"""`python -m zengine.commands.bound script.py ...`: keep to this process's share of the cores, then run the script.

torchrun starts it in each process.  The cores that the process may use are cut into as many runs of neighbours as
there are processes on the host (LOCAL_WORLD_SIZE); this one takes its own (LOCAL_RANK).  Neighbours share caches and,
mostly, the memory of one socket.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterable, Mapping

__all__ = ["cores_of", "main"]


def cores_of(available: Iterable[int], rank: int, size: int) -> list[int]:
    """The cores of one of `size` processes: runs of equal length, one core at least.  Pure."""
    cores = sorted(available)
    share = len(cores) // size
    if share == 0:
        return [cores[rank % len(cores)]]
    return cores[rank * share : (rank + 1) * share]


def bind(environ: Mapping[str, str]) -> list[int]:
    """Bind this process; its cores."""
    own = cores_of(
        os.sched_getaffinity(0), int(environ.get("LOCAL_RANK", "0")), int(environ.get("LOCAL_WORLD_SIZE", "1"))
    )
    os.sched_setaffinity(0, own)
    return own


def main(argv: list[str]) -> None:
    """Bind, and become the script."""
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
