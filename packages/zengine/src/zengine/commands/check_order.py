"""`zengine check-order`: whether all ranks of a run launch the same collectives in one order, without these ranks.

`check-order config.json --world 1024 --model train:make --batch train:batch` plays ranks of the run in this process,
on tensors whose values are never computed, and compares what they launch (`zengine.ordering`).  A difference is
printed with ranks, position, both operations and their lines of code; the exit status is then 1.

The model is built as in training (`zcomm.init()` and groups work), once for each rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zengine.commands import CommandError
from zengine.commands.config import parse_auto
from zengine.config import load
from zengine.ordering.check import check
from zengine.ordering.decisions import Script
from zengine.ordering.play import PlayedRun
from zengine.ordering.unknown import Undecided
from zengine.planning.models import (
    NotAFactory,
    Transformer,
    factory_batches,
    load_factory,
    shape_of,
    shaped_batches,
    token_batches,
)

__all__ = ["run"]

_EXAMPLE, _TOKENS = 1e8, 128  # parameters of the default transformer, and its sequence length


def run(arguments: argparse.Namespace) -> int:
    """Print the result.  Raises ConfigError, or CommandError if the run cannot be played."""
    try:
        subject = PlayedRun(
            config=load(arguments.config, auto=parse_auto(arguments.auto)),
            make_model=_model(arguments),
            make_batch=_batch(arguments),
            world_size=arguments.world,
            train=load_factory(arguments.step) if arguments.step else None,
            decisions=_decisions(arguments.oracle),
            script=Script(seed=arguments.seed),
        )
    except NotAFactory as error:
        raise CommandError(str(error)) from None
    try:
        found = check(subject)
    except Undecided as error:
        raise CommandError(f"{error}. Pass --oracle module:table, {{place: function of a DataRead}}") from None
    print(found.text())
    return 1 if found.found or not found.is_settled else 0


def _model(arguments: argparse.Namespace) -> Callable[[], nn.Module]:
    if arguments.model:
        return load_factory(arguments.model)
    shape = shape_of(arguments.params or _EXAMPLE, width=arguments.hidden, layers=arguments.layers)
    return lambda: Transformer(shape)


def _batch(arguments: argparse.Namespace) -> Callable[[int], Any]:
    if arguments.batch:
        return factory_batches(arguments.batch)
    if arguments.inputs:
        try:
            return shaped_batches(arguments.inputs, torch.float32)
        except ValueError as error:
            raise CommandError(f"--inputs {error}") from None
    if arguments.tokens or not arguments.model or arguments.step:
        return token_batches(arguments.tokens or _TOKENS)
    raise CommandError(
        "the model needs an input: pass --batch module:factory, --tokens 1024 or --inputs 3x224x224, or a whole step "
        "with --step module:function"
    )


def _decisions(name: str) -> Mapping[str, Any]:
    if not name:
        return {}
    found = load_factory(name)()
    if not isinstance(found, Mapping):
        raise CommandError(
            f"--oracle {name} returned a {type(found).__name__}; it must return a dict, place -> function"
        )
    return found
