"""Loading of a config: checked key by key, not yet resolved.

`load` checks that a file is well formed, which needs no machine: it can run on a laptop for a job of a thousand
ranks.  `resolve` does the part that depends on the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from zengine.config.grammar.errors import NOWHERE, ConfigError, Place, Problem
from zengine.config.grammar.source import Source, read
from zengine.config.keys.root import Settings
from zengine.config.reading.auto import fill_autos
from zengine.config.reading.choices import check_choices
from zengine.config.reading.structure import structure
from zengine.config.reading.versions import pin

__all__ = ["Config", "at", "load", "violation"]


@attrs.frozen(kw_only=True)
class Config:
    """Config as written, with typed values and defaults filled in."""

    source: str  # the file as it was named, "<json>" or "dict"
    settings: Settings
    given: Mapping[str, Place]  # keys that were written and have an effect -> place
    autos: Mapping[str, str]  # keys that were written as "auto" -> origin of their values
    pinned: Mapping[str, str]  # absent keys with the default of another release -> its name
    notices: tuple[str, ...]  # lines to log once
    document: Mapping[str, Any] = attrs.field(factory=dict)  # the source as it was given
    filled: Mapping[str, Any] = attrs.field(factory=dict)  # the caller's values for keys that are "auto"

    def origin(self, key: str) -> str:
        """Return the origin of a key: `config.json:4`, "dict", "auto", the pinned release, or "default"."""
        if key in self.autos:
            return "auto"
        return self.given[key].origin() if key in self.given else self.pinned.get(key, "default")


def _is_repeated(problem: Problem, others: tuple[Problem, ...]) -> bool:
    """Return True if a problem only repeats that an "auto" of its section was not replaced."""
    section = problem.key.partition(".")[0]
    missing = [other.key.rpartition(".")[2] for other in others if other.key.startswith(f"{section}.")]
    return any(f"needs {name}" in problem.reason for name in missing)


def load(source: Source, *, auto: Mapping[str, Any] | None = None) -> Config:
    """Read a JSON file, a JSON text or a mapping; `auto` (dotted key -> value) replaces "auto" in the file.

    Raises ConfigError, a ValueError, with every problem of the source; TypeError for another kind of source.

    >>> from zengine.config import load
    >>> load({"train_batch_size": 8, "fp16": {"enabled": True}}).settings.fp16.enabled
    True
    >>> try:
    ...     load({"train_batch": 8})
    ... except ValueError as error:
    ...     print(error)
    the config dict: 1 problem
      train_batch = 8: unknown key. Did you mean "train_batch_size"?
    """
    document = read(source)
    if document.data is None and document.problems:
        raise ConfigError(document.source, document.problems)
    filled = fill_autos(document, auto or {})
    pinning = pin(filled.document)
    reading = structure(pinning.document)
    choices = check_choices(reading.settings, pinning.document)
    problems = (
        *document.problems,
        *filled.problems,
        *pinning.problems,
        *reading.problems,
        *(problem for problem in choices.problems if not _is_repeated(problem, filled.problems)),
    )
    if problems:
        raise ConfigError(document.source, problems)
    given = {**reading.given, **choices.given}
    return Config(
        source=document.source,
        settings=reading.settings,
        document=dict(document.data) if isinstance(document.data, Mapping) else {},
        given={key: place for key, place in given.items() if key not in pinning.pinned},
        autos=filled.autos,
        filled=dict(auto or {}),
        pinned=pinning.pinned,
        notices=(*reading.notices, *filled.notices, *pinning.notices),
    )


# -- helpers of rules between keys -----------------------------------------------------------------


def at(config: Config, key: str) -> str:
    """Format a key with its place: `key (config.json:4)`; the key alone if no file has it."""
    place = config.given.get(key, NOWHERE)
    return f"{key} ({place.origin()})" if place.line else key


def violation(config: Config, key: str, reason: str, suggestion: str) -> Problem:
    """Return a problem at the place of `key`."""
    return Problem(place=config.given.get(key, NOWHERE), reason=reason, suggestion=suggestion)
