"""How a broken rule between keys is told: both sides, where they stand, and what to do."""

from __future__ import annotations

from zengine.config.errors import NOWHERE, Problem
from zengine.config.load import Config

__all__ = ["at", "violation"]


def at(config: Config, key: str) -> str:
    """`key (config.json:4)`, the key alone when it was not written in a file."""
    place = config.given.get(key, NOWHERE)
    return f"{key} ({place.origin()})" if place.line else key


def violation(config: Config, key: str, reason: str, suggestion: str) -> Problem:
    """The problem, at the place of `key`."""
    return Problem(place=config.given.get(key, NOWHERE), reason=reason, suggestion=suggestion)
