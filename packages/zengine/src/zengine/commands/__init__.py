"""The commands of `zengine`, one module each.

A module has `add_parser(subparsers)`, which declares the command under its own name, and `run(arguments) -> int`,
which does it and returns the exit status.  `zengine.cli` holds the table.  What a person can mend is raised as
`CommandError` (or as the ConfigError of a config): the table prints it without a traceback and returns 1.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["Command", "CommandError", "positive"]


class CommandError(ValueError):
    """Something about the call that a person can mend: what was given, what is allowed, what to do."""


class Command(Protocol):
    """What a module of this package offers."""

    def add_parser(self, subparsers: Subparsers, /) -> object: ...

    def run(self, arguments: argparse.Namespace, /) -> int: ...


def positive(text: str) -> int:
    """A whole number of at least 1; for `type=` of an argument."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value
