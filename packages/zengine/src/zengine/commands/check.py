"""`zengine check config.json`: report every problem of a config, on any machine."""

from __future__ import annotations

import argparse

from zengine.commands.arguments import facts_of
from zengine.config import ConfigError, load, resolve, violations


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
    print("\n".join([f"{arguments.config}: no problems (pass --world to check batch sizes too)", *config.notices]))
    return 0
