"""`python -m zengine check config.json` and `... explain config.json --world-size 8`.

`check` reads a config anywhere, also without the machines it is for; `explain` prints the resolved plan with the
origin of every value.  Exit code 1 means problems, which are on standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from zengine.config import Config, ConfigError, Facts, load, resolve, violations
from zengine.measure import bf16_is_faster


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        print(arguments.run(arguments.config, arguments.world_size))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def check(path: str, world_size: int) -> str:
    """Report every problem of a config, and its notices.  Raises ConfigError."""
    config = load(path)
    if world_size:
        return "\n".join([f"{path}: no problems at world size {world_size}", *_plan(config, world_size)[1]])
    problems = violations(config)
    if problems:
        raise ConfigError(config.source, problems)
    return "\n".join([f"{path}: no problems (give --world-size to check the batch sizes too)", *config.notices])


def explain(path: str, world_size: int) -> str:
    """Print every value that a run would use, with its origin.  Raises ConfigError."""
    return _plan(load(path), world_size)[0]


def _plan(config: Config, world_size: int) -> tuple[str, tuple[str, ...]]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    is_faster = bf16_is_faster(config, torch.device(device), None)
    facts = Facts(world_size=world_size, replicas=world_size, device_type=device, bf16_is_faster=is_faster)
    plan = resolve(config, facts)
    return plan.describe(), plan.notices


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m zengine", description="Training configs, before a run.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for run, is_needed in ((check, False), (explain, True)):
        command = commands.add_parser(run.__name__, help=str(run.__doc__).split("  ")[0])
        command.add_argument("config", help="a JSON file")
        command.add_argument("--world-size", type=_positive, default=0, required=is_needed, metavar="N")
        command.set_defaults(run=run)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value
