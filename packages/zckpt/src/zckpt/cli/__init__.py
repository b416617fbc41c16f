"""The command line: `zckpt`, or `python -m zckpt`.

Results go to stdout; notes, errors and the progress bar (on a terminal only) go to stderr.  parser.py holds the
arguments and the meaning of the exit status.  The code of a command is imported when it runs.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zckpt.cli.parser import make_parser
from zckpt.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    CheckpointInputError,
    CheckpointMismatch,
    CheckpointNotFound,
)

if TYPE_CHECKING:
    import argparse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parsed = make_parser().parse_args(arguments)
    from zckpt.cli.output import CORRUPT, FAILED, USAGE

    try:
        status = _function(parsed.run)(parsed)
        sys.stdout.flush()  # here, so that a closed pipe is no traceback at exit
        return status
    except CheckpointCorrupt as error:
        return _report("damaged", error, CORRUPT)
    except CheckpointNotFound as error:
        return _report("not found", error, USAGE)
    except (CheckpointInputError, CheckpointMismatch, CheckpointExists) as error:
        return _report("error", error, USAGE)
    except BrokenPipeError:  # `zckpt inspect ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (CheckpointError, OSError) as error:
        return _report("failed", error, FAILED)


def _function(run: str) -> Callable[[argparse.Namespace], int]:
    """The function that "module:function" names."""
    module, _, name = run.partition(":")
    found: Callable[[argparse.Namespace], int] = getattr(importlib.import_module(f"zckpt.cli.{module}"), name)
    return found


def _report(what: str, error: Exception, status: int) -> int:
    print(f"{what}: {error}", file=sys.stderr)
    return status
