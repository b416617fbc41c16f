"""`zengine explain config.json --world 64`: explain a config at a world size, on any machine.

Prints the resolved plan with the origin of every value, the batch sizes, the memory of a rank by owner, the bytes it
sends in a step, and advice.  The model is the user's (`--model module:factory`) or a transformer of `--params`
parameters, one billion by default.
"""

from __future__ import annotations

import argparse
import json

from zengine.commands.arguments import facts_of, make_model, parse_auto
from zengine.config import load, resolve
from zengine.planning.explanation import explain


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation.  Raises ConfigError with every problem, CommandError if the model cannot be made."""
    config = load(arguments.config, auto=parse_auto(arguments.auto))
    facts = facts_of(config, arguments.world, arguments.device)
    plan = resolve(config, facts)
    module, subject = make_model(arguments)
    explanation = explain(config, plan, facts, module, subject)
    if arguments.json:
        print(json.dumps(explanation.as_json(), indent=1, default=str))
    else:
        print(explanation.text(everything=arguments.all))
    return 0
