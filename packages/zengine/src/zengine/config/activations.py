"""Activation checkpointing in a plan: its rules, what it says to people, its rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs

from zengine.config.activation_settings import ActivationCheckpointing
from zengine.config.errors import Problem
from zengine.config.violating import at, violation

if TYPE_CHECKING:
    from zengine.config.load import Config
    from zengine.config.parallel import ParallelPlan

__all__ = ["ActivationCheckpointing", "activation_notices", "activation_rows", "one_piece_of_parts_has_a_size"]

SECTION = "activation_checkpointing"


def activation_rows(settings: ActivationCheckpointing) -> Iterator[tuple[str, Any]]:
    """Key and value for people."""
    for name, value in attrs.asdict(settings).items():
        yield f"{SECTION}.{name}", (", ".join(value) or "(those that the model says)") if name == "modules" else value


def one_piece_of_parts_has_a_size(config: Config) -> Problem | None:
    """contiguous_memory_optimization holds parts of activations, a number of them that somebody has to know."""
    section = config.settings.activation_checkpointing
    if not section.contiguous_memory_optimization:
        return None
    needed = [name for name in ("partition_activations", "number_checkpoints") if not getattr(section, name)]
    if not needed:
        return None
    key = f"{SECTION}.contiguous_memory_optimization"
    return violation(
        config,
        key,
        f"{at(config, key)} keeps parts of activations in one piece of memory, and {' and '.join(needed)} "
        f"{'is' if len(needed) == 1 else 'are'} not set",
        'Set "partition_activations" to true and "number_checkpoints" to the blocks that a forward passes, or leave '
        "it out.",
    )


def activation_notices(config: Config, parallel: ParallelPlan) -> list[str]:
    """Keys that have nothing to do here."""
    section, found = config.settings.activation_checkpointing, []
    if section.partition_activations and parallel.degrees.tensor == 1:
        found.append(f"{at(config, f'{SECTION}.partition_activations')}: there is one tensor rank, which keeps all")
    if section.number_checkpoints and not section.contiguous_memory_optimization:
        found.append(
            f"{at(config, f'{SECTION}.number_checkpoints')} counts with contiguous_memory_optimization alone"
        )
    return found
