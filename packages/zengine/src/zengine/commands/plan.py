"""`zengine explain` and `zengine plan`: what a config means for a model, on any machine.

`explain config.json --world 64` prints the resolved plan with the origin of every value, the batch sizes, the memory
of a rank by owner, the bytes it sends in a step, and advice.

`plan config.json --world 8 --model train:make --memory 80GB` forecasts what fits: the peak of a rank by phase, the
largest micro-batch at each ZeRO stage, and the stage that sends least for the same batch.  The model runs on fake
tensors, so nothing is allocated.  `--measure` trains a few real steps in this process and compares their peak with
the forecast.

The model is the user's (`--model module:factory`) or a transformer of `--params` parameters, one billion by default.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import nn

import zcomm
import zpartition
from zengine.build.assemble import Client
from zengine.commands import CommandError
from zengine.commands.config import facts_of, parse_auto
from zengine.config import Facts, Plan, load, resolve
from zengine.initialize import make_engine
from zengine.planning.activations import CannotDryRun
from zengine.planning.explanation import explain
from zengine.planning.forecast import forecast
from zengine.planning.measured import CannotMeasure, measure, single_process_plan
from zengine.planning.models import (
    Batch,
    NotAFactory,
    Transformer,
    build_model,
    factory_batches,
    load_factory,
    shape_of,
    shaped_batches,
    token_batches,
)
from zengine.planning.sizes import Workload, peak, rank_memory_bytes
from zengine.progress import progress

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_EXAMPLE = 1e9  # parameters of the default transformer
_TOKENS = 1024  # of a sequence, for the example transformer


def run_explain(arguments: argparse.Namespace) -> int:
    """Print the explanation.  Raises ConfigError with every problem, CommandError if the model cannot be made."""
    config = load(arguments.config, auto=parse_auto(arguments.auto))
    facts = facts_of(config, arguments.world, arguments.device)
    plan = resolve(config, facts)
    module, subject = _make_model(arguments)
    explanation = explain(config, plan, facts, module, subject)
    if arguments.json:
        print(json.dumps(explanation.as_json(), indent=1, default=str))
    else:
        print(explanation.text(everything=arguments.all))
    return 0


def run_plan(arguments: argparse.Namespace) -> int:
    """Print the forecast.  Raises ConfigError, or CommandError if the model cannot be planned."""
    config = load(arguments.config, auto=parse_auto(arguments.auto))
    facts = facts_of(config, arguments.world, arguments.device)
    plan = resolve(config, facts)
    module, subject = _make_model(arguments)
    case = Workload(
        module=plan.precision.cast_module(module),
        batch=_batch(arguments, plan),
        device=facts.device_type,
        autocast=plan.numerics.autocast,
    )
    try:
        with progress("dry runs of the model"):
            found = forecast(config, plan, facts, case, room_bytes=_room(arguments, facts))
        if arguments.measure:
            with progress("training a few steps"):
                found = attrs.evolve(found, measured=_measured(plan, arguments, case))
    except CannotDryRun as error:
        raise CommandError(str(error)) from None
    found = attrs.evolve(found, subject=subject)
    print(json.dumps(found.as_json(), indent=1) if arguments.json else found.text())
    return 0 if found.own_fits else 1


def _make_model(arguments: argparse.Namespace) -> tuple[nn.Module, str]:
    """Return the model to plan for, on the meta device, and its description."""
    if arguments.model:
        try:
            made = build_model(arguments.model)
        except NotAFactory as error:
            raise CommandError(f"--model {error}") from None
        return made, f"{arguments.model} ({sum(p.numel() for p in made.parameters()) / 1e6:,.1f}M parameters)"
    is_given = arguments.params or (arguments.hidden and arguments.layers)
    shape = shape_of(arguments.params or _EXAMPLE, width=arguments.hidden, layers=arguments.layers)
    made = zpartition.on_meta(lambda: Transformer(shape))
    return made, str(shape) + ("" if is_given else " (an example: pass --params or --model)")


def _batch(arguments: argparse.Namespace, plan: Plan) -> Batch:
    try:
        if arguments.batch:
            return factory_batches(arguments.batch)
        if arguments.inputs:
            return shaped_batches(
                arguments.inputs, (plan.precision.param if plan.cast_inputs else None) or torch.float32
            )
    except (NotAFactory, ValueError) as error:
        raise CommandError(f"{'--batch' if arguments.batch else '--inputs'} {error}") from None
    if arguments.tokens or not arguments.model:
        return token_batches(arguments.tokens or _TOKENS)
    raise CommandError("the model needs an input: pass --batch module:factory, --tokens 1024 or --inputs 3x224x224")


def _room(arguments: argparse.Namespace, facts: Facts) -> int:
    """Return the memory of one rank in bytes."""
    if arguments.memory:
        found = re.fullmatch(r"([0-9.]+) *([kmgt]?i?)b?", arguments.memory.strip().lower())
        if not found:
            raise CommandError(f'--memory "{arguments.memory}" is not a size; write 80GB or 24GiB')
        return int(float(found[1]) * float(_UNITS[found[2]]))
    if facts.device_type == "cuda" and not torch.cuda.is_available():
        raise CommandError("there is no GPU to read the memory size of: pass --memory 80GB")
    return rank_memory_bytes(facts.device_type, arguments.world)


def engine_starter(plan: Plan) -> Callable[[nn.Module], Any]:
    """Return the `start` of `measure`: a function that makes an engine under `plan` in this process."""

    def start(module: nn.Module) -> Any:
        return make_engine(module, Client(), plan, zcomm.init(), zcomm.Groups.of(zcomm.Degrees(), 1, 0))

    return start


def _measured(plan: Plan, arguments: argparse.Namespace, case: Workload) -> tuple[int, int]:
    """Return the (measured, planned) peak of this process, in bytes."""
    if not arguments.model:
        raise CommandError("--measure trains your model: pass --model module:factory")
    own = single_process_plan(plan)
    micro_batch = own.batch.micro_batch_size
    try:
        found = measure(
            load_factory(arguments.model),
            case.batch,
            engine_starter(own),
            micro_batch=micro_batch,
            device=case.device,
        )
    except CannotMeasure as error:
        raise CommandError(str(error)) from None
    return found.peak, peak(case, own, micro_batch, 1).total
