"""Errors of a config: all problems in one exception.

A config is fixed in one pass if every problem is reported at once.  A `Problem` has the place, the key, the given
value, the reason and what to write instead; `ConfigError` carries all of them and prints one line each.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable

import attrs

from zengine.pages import Page, explained

_SHOWN_CHARACTERS = 48  # of a given value; a longer one is cut


class Nothing(enum.Enum):
    """Sentinel for a problem without a single given value; unpickles to the same object."""

    NOTHING = "nothing"


NOTHING = Nothing.NOTHING
_SOURCE_NAMES = {"dict": "the config dict", "<json>": "the config text"}


def shown(value: object) -> str:
    """Return `value` as JSON, cut to fit a line."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


@attrs.frozen(kw_only=True)
class Place:
    """Position of a value in its source; line and column count from 1; 0: the source has none."""

    source: str = "dict"  # a file as the user named it, "<json>" for JSON text, "dict"
    line: int = 0
    column: int = 0

    def origin(self) -> str:
        """Return the short form for tables and equations: `config.json:4`."""
        name = self.source.replace("\\", "/").rsplit("/", 1)[-1]
        return f"{name}:{self.line}" if self.line else name

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else ""


NOWHERE = Place()


@attrs.frozen(kw_only=True)
class Problem:
    """One mistake in a config, with keys and values as the user wrote them."""

    reason: str  # why the value is rejected
    key: str = ""  # dotted path, "zero_optimization.stage"; "" for the source as a whole
    given: object = NOTHING  # the value as typed
    suggestion: str = ""  # a sentence with what to write instead
    place: Place = NOWHERE

    def __str__(self) -> str:
        has_value = self.key and self.given is not NOTHING
        what = f"{self.key} = {shown(self.given)}" if has_value else self.key
        head = "  ".join(part for part in (str(self.place), what) if part)
        tail = f"{self.reason}. {self.suggestion}" if self.suggestion else self.reason
        return f"{head}: {tail}" if head else tail


@explained(Page.CONFIG)
class ConfigError(ValueError):
    """Invalid config; `problems` holds every reason, in the order of the source."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        ordered = sorted(problems, key=lambda problem: (problem.place.line, problem.place.column))
        self.source = source
        self.problems = tuple(ordered)
        super().__init__(self._text())

    def _text(self) -> str:
        """Return a heading and a line per problem; a single line for a problem of the source itself."""
        count, name = len(self.problems), _SOURCE_NAMES.get(self.source, self.source)
        if count == 1 and not self.problems[0].key and not self.problems[0].place.line:
            return f"{name}: {self.problems[0]}"
        heading = f"{name}: {count} problem{'s' if count != 1 else ''}"
        return "\n  ".join([heading, *map(str, self.problems)])

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, tuple[Problem, ...]]]:
        """Pickle the arguments, not the joined text, so that the error survives the trip from a rank process."""
        return type(self), (self.source, self.problems)
