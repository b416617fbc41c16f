"""A config as it was written: checked key by key, not yet resolved.

`load` answers "is this file well formed", for which no machine is needed: it can run on a laptop for a job of a
thousand ranks.  What depends on the machine waits for `resolve`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from zengine.config.choices import check_choices
from zengine.config.errors import ConfigError, Place
from zengine.config.schema import Settings
from zengine.config.source import Source, read
from zengine.config.structure import structure


@attrs.frozen(kw_only=True)
class Config:
    """What a person wrote, with typed values and defaults filled in."""

    source: str  # the file as it was named, "<json>" or "dict"
    settings: Settings
    given: Mapping[str, Place]  # keys that were written and act -> where
    notices: tuple[str, ...]  # one line for each thing that a person should hear about once
    document: Mapping[str, Any] = attrs.field(factory=dict)  # the source as it was given

    def origin(self, key: str) -> str:
        """`config.json:4`, "dict", or "default" for a key that was not written."""
        return self.given[key].origin() if key in self.given else "default"


def load(source: Source) -> Config:
    """Read a JSON file, a JSON text or a mapping.

    Raises ConfigError, a ValueError, with every problem of the source; TypeError for another kind of source.
    """
    document = read(source)
    if document.data is None and document.problems:
        raise ConfigError(document.source, document.problems)
    reading = structure(document)
    choices = check_choices(reading.settings, document)
    problems = (*document.problems, *reading.problems, *choices.problems)
    if problems:
        raise ConfigError(document.source, problems)
    return Config(
        source=document.source,
        settings=reading.settings,
        given={**reading.given, **choices.given},
        notices=reading.notices,
        document=dict(document.data) if isinstance(document.data, Mapping) else {},
    )
