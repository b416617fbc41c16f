"""`zengine plan config.json --world 8 --model train:make --batch train:batch --memory 80GB`: what fits, before a run.

The peak of a rank by phase, the largest micro-batch that fits at each stage, and the stage that sends least for the
same batch.  Nothing is allocated: the model runs dry.  `--measure` trains a few real steps in this process, alone,
and holds the plan against what they took.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import torch

from zengine.commands import CommandError, positive
from zengine.commands.explain import add_fill, add_model, filled, model
from zengine.commands.facts import facts_of
from zengine.config import Facts, Plan, load, resolve
from zengine.planning.activations import CannotDryRun
from zengine.planning.batches import Batch, from_factory, inputs, token_ids
from zengine.planning.forecast import forecast
from zengine.planning.measured import CannotMeasure, alone, measure, started
from zengine.planning.models import NotAFactory, factory
from zengine.planning.peaks import Subject, peak

if TYPE_CHECKING:
    from zengine.commands import Subparsers

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_TOKENS = 1024  # of a sequence, for the example transformer


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "plan", help="The peak of a rank, the largest micro-batch that fits, and the best stage; without a GPU."
    )
    parser.add_argument("config", help="a JSON file")
    parser.add_argument("--world", dest="world", type=positive, default=1, metavar="N", help="ranks; default: 1")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="", help="what it runs on; default: as here")
    parser.add_argument("--memory", default="", metavar="80GB", help="of one rank; default: what is here")
    parser.add_argument(
        "--batch", default="", metavar="MODULE:FACTORY", help="micro-batch size -> the model's argument"
    )
    parser.add_argument("--tokens", type=positive, default=0, metavar="T", help="or ids of this length")
    parser.add_argument("--inputs", default="", metavar="3x224x224", help="or samples of this shape")
    parser.add_argument("--measure", action="store_true", help="train a few steps here, alone, and compare")
    parser.add_argument("--json", action="store_true", help="for programs")
    add_fill(parser)
    add_model(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the forecast.  Raises ConfigError, and CommandError for what cannot be planned."""
    config = load(arguments.config, auto=filled(arguments.auto))
    facts = facts_of(config, arguments.world, arguments.device)
    plan = resolve(config, facts)
    module, subject = model(arguments)
    case = Subject(
        module=plan.precision.cast_module(module),
        batch=_batch(arguments, plan),
        device=facts.device_type,
        autocast=plan.numerics.autocast,
    )
    try:
        found = forecast(config, plan, facts, case, room_bytes=_room(arguments, facts))
        if arguments.measure:
            found = attrs.evolve(found, measured=_measured(plan, arguments, case))
    except CannotDryRun as error:
        raise CommandError(str(error)) from None
    found = attrs.evolve(found, subject=subject)
    print(json.dumps(found.as_json(), indent=1) if arguments.json else found.text())
    return 0 if found.own_fits else 1


def _batch(arguments: argparse.Namespace, plan: Plan) -> Batch:
    try:
        if arguments.batch:
            return from_factory(arguments.batch)
        if arguments.inputs:
            return inputs(arguments.inputs, (plan.precision.param if plan.cast_inputs else None) or torch.float32)
    except (NotAFactory, ValueError) as error:
        raise CommandError(f"{'--batch' if arguments.batch else '--inputs'} {error}") from None
    if arguments.tokens or not arguments.model:
        return token_ids(arguments.tokens or _TOKENS)
    raise CommandError("say what the model is given: --batch module:factory, --tokens 1024 or --inputs 3x224x224")


def _room(arguments: argparse.Namespace, facts: Facts) -> int:
    """Bytes of one rank."""
    if arguments.memory:
        found = re.fullmatch(r"([0-9.]+) *([kmgt]?i?)b?", arguments.memory.strip().lower())
        if not found:
            raise CommandError(f'--memory "{arguments.memory}" is no size; write 80GB or 24GiB')
        return int(float(found[1]) * float(_UNITS[found[2]]))
    if facts.device_type == "cuda":
        if not torch.cuda.is_available():
            raise CommandError("there is no GPU here to ask how much memory it has: say --memory 80GB")
        total: int = torch.cuda.get_device_properties(0).total_memory
        return total
    words = Path("/proc/meminfo").read_text().split()
    num_ranks: int = arguments.world
    return int(words[words.index("MemTotal:") + 1]) * 1024 // num_ranks


def _measured(plan: Plan, arguments: argparse.Namespace, case: Subject) -> tuple[int, int]:
    """(measured, planned) peak of this process alone."""
    if not arguments.model:
        raise CommandError("--measure trains your model: say --model module:factory")
    own = alone(plan)
    micro_batch = own.batch.micro_batch_size
    try:
        found = measure(
            factory(arguments.model), case.batch, started(own), micro_batch=micro_batch, device=case.device
        )
    except CannotMeasure as error:
        raise CommandError(str(error)) from None
    return found.peak, peak(case, own, micro_batch, 1).total
