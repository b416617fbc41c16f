"""`zengine COMMAND ...`, also `python -m zengine COMMAND ...`: the table of commands.

A command is a module of `zengine.commands` and one line here.  Exit status: 0 when all is well, 1 when something is
wrong and standard error says what, 2 when the command line itself is.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from zengine.commands import Command, CommandError, check, convert_config, env, explain, plan, report, run
from zengine.config import ConfigError

COMMANDS: Mapping[str, Command] = {
    "check": check,
    "explain": explain,
    "plan": plan,
    "run": run,
    "report": report,
    "env": env,
    "convert-config": convert_config,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        status = COMMANDS[arguments.command].run(arguments)
        sys.stdout.flush()  # here, where a reader that has gone (`zengine explain ... | head`) can be caught
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end
        return 1
    except (ConfigError, CommandError) as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zengine", description="Training with zengine: before, during and after a run."
    )
    subparsers = parser.add_subparsers(required=True, dest="command", metavar="command")
    for command in COMMANDS.values():
        command.add_parser(subparsers)
    return parser
