"""`zengine explain config.json --world 64`: what a run would do, need and send, without a machine for it.

The resolved plan with the origin of every value, the batch triangle, the memory of a rank by owner, the bytes that it
sends in a step, and what is worth knowing.  The model is the user's (`--model module:factory`), or a transformer of
`--params` parameters; by default one of a billion, to have numbers at all.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zengine.commands import CommandError, positive
from zengine.commands.facts import facts_of
from zengine.config import ConfigError, Problem, load, resolve
from zengine.planning.explanation import explain
from zengine.planning.models import NotAFactory, Transformer, called, shape_of

if TYPE_CHECKING:
    from zengine.commands import Subparsers

EXAMPLE = 1e9  # parameters, where nobody says


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "explain", help="What a config does at a world size: values with origins, memory, traffic, advice."
    )
    parser.add_argument("config", help="a JSON file")
    parser.add_argument(
        "--world", "--world-size", dest="world", type=positive, required=True, metavar="N", help="ranks"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="", help="what it runs on; default: as here")
    parser.add_argument("--all", action="store_true", help="show values at their defaults, too")
    parser.add_argument("--json", action="store_true", help="for programs")
    add_fill(parser)
    add_model(parser)


def add_fill(parser: argparse.ArgumentParser) -> None:
    """What an integration would fill in."""
    parser.add_argument(
        "--auto", action="append", default=[], metavar="KEY=VALUE", help='a value that the file calls "auto"'
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """How a model is told."""
    parser.add_argument("--model", default="", metavar="MODULE:FACTORY", help="your model, made without memory")
    parser.add_argument("--params", type=float, default=0.0, metavar="NUMBER", help="or a transformer: 1.3e9")
    parser.add_argument("--hidden", type=positive, default=0, metavar="H", help="its width")
    parser.add_argument("--layers", type=positive, default=0, metavar="L", help="its layers")


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation.  Raises ConfigError with every problem, CommandError for a model that cannot be made."""
    config = load(arguments.config, auto=filled(arguments.auto))
    facts = facts_of(config, arguments.world, arguments.device)
    plan = resolve(config, facts)
    module, subject = model(arguments)
    explanation = explain(config, plan, facts, module, subject)
    if arguments.json:
        print(json.dumps(explanation.as_json(), indent=1, default=str))
    else:
        print(explanation.text(everything=arguments.all))
    return 0


def filled(pairs: list[str]) -> dict[str, Any]:
    """`KEY=VALUE` of the command line; values are JSON, or text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(
                "--auto", [Problem(reason=f'"{pair}" is not KEY=VALUE', suggestion="Write train_batch_size=64.")]
            )
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found


def model(arguments: argparse.Namespace) -> tuple[nn.Module, str]:
    """The model to plan for, without memory, and its name in words."""
    if arguments.model:
        try:
            made = called(arguments.model)
        except NotAFactory as error:
            raise CommandError(f"--model {error}") from None
        return made, f"{arguments.model} ({sum(p.numel() for p in made.parameters()) / 1e6:,.1f}M parameters)"
    is_told = arguments.params or (arguments.hidden and arguments.layers)
    shape = shape_of(arguments.params or EXAMPLE, width=arguments.hidden, layers=arguments.layers)
    with torch.device("meta"):
        made = Transformer(shape)
    return made, str(shape) + ("" if is_told else " (an example: say --params or --model)")
