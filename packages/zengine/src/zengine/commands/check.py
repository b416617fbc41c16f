"""`zengine check config.json`: every problem of a config, anywhere, also without the machines that it is for."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from zengine.commands import positive
from zengine.commands.facts import facts_of
from zengine.config import ConfigError, load, resolve, violations

if TYPE_CHECKING:
    from zengine.commands import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("check", help="Report every problem of a config, and its notices.")
    parser.add_argument("config", help="a JSON file")
    parser.add_argument("--world", "--world-size", dest="world", type=positive, default=0, metavar="N", help="ranks")


def run(arguments: argparse.Namespace) -> int:
    """Print the notices.  Raises ConfigError with every problem."""
    config = load(arguments.config)
    if arguments.world:
        plan = resolve(config, facts_of(config, arguments.world))
        print("\n".join([f"{arguments.config}: no problems at world size {arguments.world}", *plan.notices]))
        return 0
    problems = violations(config)
    if problems:
        raise ConfigError(config.source, problems)
    print(
        "\n".join([f"{arguments.config}: no problems (give --world to check the batch sizes too)", *config.notices])
    )
    return 0
