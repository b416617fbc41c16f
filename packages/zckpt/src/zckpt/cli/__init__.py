"""The command line: `zckpt`, or `python -m zckpt`.

Exit status: 0 all is well (`diff`: no difference); 1 something is damaged (`diff`: something differs); 2 wrong usage,
nothing there, or never committed; 3 the disk, the store or a lock refused.  Results go to stdout, notes, errors and
the progress bar (on a terminal only) to stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from ..errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    CheckpointInputError,
    CheckpointMismatch,
    CheckpointNotFound,
)
from . import convert, diff, inspecting, listing, prune, verify
from .status import CORRUPT, REFUSED, USAGE

_Add = Callable[[argparse.ArgumentParser], None]
_Run = Callable[[argparse.Namespace], int]

_COMMANDS: tuple[tuple[str, tuple[str, ...], str, _Add, _Run], ...] = (
    ("ls", (), "the checkpoints of a root, newest first", listing.add_arguments, listing.run),
    ("inspect", ("show",), "what one checkpoint holds", inspecting.add_arguments, inspecting.run),
    ("verify", (), "read every byte and compare every checksum", verify.add_arguments, verify.run),
    ("diff", (), "what differs between two checkpoints", diff.add_arguments, diff.run),
    ("export", (), "write a checkpoint in another format", convert.add_export_arguments, convert.run_export),
    ("import", (), "bring in a checkpoint of another format", convert.add_import_arguments, convert.run_import),
    ("prune", (), "delete checkpoints that no rule keeps", prune.add_arguments, prune.run),
)  # fmt: skip

_EPILOG = """\
A path is a root folder, one checkpoint in it, or the URL of either (s3://bucket/run, with fsspec installed).

exit status:
  0  all is well; diff: no difference
  1  something is damaged; diff: something differs
  2  wrong usage, nothing there, or never committed
  3  the disk, the store or a lock refused
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    chosen = _parser().parse_args(arguments)
    run: _Run = chosen.run
    try:
        status = run(chosen)
        sys.stdout.flush()  # here, where a reader that has gone away is no traceback
        return status
    except CheckpointCorrupt as error:
        return _tell("damaged", error, CORRUPT)
    except CheckpointNotFound as error:
        return _tell("not found", error, USAGE)
    except (CheckpointInputError, CheckpointMismatch, CheckpointExists) as error:
        return _tell("error", error, USAGE)
    except BrokenPipeError:  # `zckpt inspect ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return REFUSED
    except (CheckpointError, OSError) as error:
        return _tell("failed", error, REFUSED)


def _tell(what: str, error: Exception, status: int) -> int:
    print(f"{what}: {error}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zckpt",
        description="Look at, check, compare, convert and thin out checkpoints.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, aliases, text, add, run in _COMMANDS:
        command = commands.add_parser(
            name,
            aliases=list(aliases),
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=_EPILOG.partition("\n\n")[2],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add(command)
        command.set_defaults(run=run)
    return parser
