"""`python -m zengine.deepspeed.launcher.launcher_helper`: runs a script as a rank that MPICH started.

RANK and LOCAL_RANK are set from MPICH's variables.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from zengine.deepspeed.launcher.constants import MPICH_LAUNCHER

__all__ = ["env_mapping", "main", "parse_args"]

_RANKS = ("PMIX_RANK", "PMI_RANK")
_LOCAL_RANKS = ("PALS_LOCAL_RANKID", "MPI_LOCALRANKID")


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of this module's command line."""
    parser = argparse.ArgumentParser(description="Run a script as a rank that MPICH started.")
    parser.add_argument("--launcher", default=MPICH_LAUNCHER, choices=[MPICH_LAUNCHER], help="the launcher")
    parser.add_argument("--module", action="store_true", help="the script is a module, as in python -m")
    parser.add_argument("--no_python", action="store_true", help="the script is a program")
    parser.add_argument("user_script", help="script, module or program")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args(args)


def env_mapping(
    env: Mapping[str, str], rank_name_list: Sequence[str] = (), local_rank_name_list: Sequence[str] = ()
) -> dict[str, str]:
    """Return the environment with RANK and LOCAL_RANK from the first names that are set.

    Raises OSError if none is set, or two disagree.
    """
    found = dict(env)
    for name, sources in (("RANK", rank_name_list), ("LOCAL_RANK", local_rank_name_list)):
        values = {env[source] for source in sources if source in env}
        if len(values) != 1:
            what = "is not in the environment" if not values else f"is ambiguous: {sorted(values)}"
            raise OSError(f"{name} {what}; one of {', '.join(sources)} tells it. Start this module with mpirun.")
        found[name] = values.pop()
    return found


def main(args: Sequence[str] | None = None) -> None:
    """Become the script."""
    given = parse_args(args)
    env = env_mapping(os.environ, _RANKS, _LOCAL_RANKS)
    python = [] if given.no_python else [sys.executable, "-u", "-m", "zengine.as_deepspeed"]
    command = [*python, *(["-m"] if given.module and python else []), given.user_script, *given.user_args]
    sys.stdout.flush()
    os.execvpe(command[0], command, env)


if __name__ == "__main__":
    main()
