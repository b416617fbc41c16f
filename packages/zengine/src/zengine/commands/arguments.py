"""Arguments that several commands share: the run's facts, values for "auto", and the model."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from torch import nn

from zengine.commands import CommandError
from zengine.config import Config, ConfigError, Facts, Problem
from zengine.initialize import bf16_is_faster
from zengine.planning.models import NotAFactory, Transformer, called, shape_of

__all__ = ["facts_of", "make_model", "parse_auto"]

EXAMPLE = 1e9  # parameters of the default transformer


def facts_of(config: Config, world_size: int, device: str = "") -> Facts:
    """Return the facts of `world_size` data-parallel ranks on `device`: "cpu", "cuda", or "" for this machine's."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    device = device or here
    is_faster = bf16_is_faster(config, torch.device(here), None) if device == here else device == "cuda"
    return Facts(world_size=world_size, replicas=world_size, device_type=device, bf16_is_faster=is_faster)


def parse_auto(pairs: list[str]) -> dict[str, Any]:
    """Parse the `KEY=VALUE` pairs of `--auto`; values are JSON or plain text."""
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


def make_model(arguments: argparse.Namespace) -> tuple[nn.Module, str]:
    """Return the model to plan for, on the meta device, and its description."""
    if arguments.model:
        try:
            made = called(arguments.model)
        except NotAFactory as error:
            raise CommandError(f"--model {error}") from None
        return made, f"{arguments.model} ({sum(p.numel() for p in made.parameters()) / 1e6:,.1f}M parameters)"
    is_given = arguments.params or (arguments.hidden and arguments.layers)
    shape = shape_of(arguments.params or EXAMPLE, width=arguments.hidden, layers=arguments.layers)
    with torch.device("meta"):
        made = Transformer(shape)
    return made, str(shape) + ("" if is_given else " (an example: pass --params or --model)")
