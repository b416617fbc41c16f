"""All problems of a config, in one error.

People fix a config in one go when they see all of it, and give up when each run shows one more mistake.  A
`Problem` is a value with the place, the key, what was given, why that cannot be and what to do; `ConfigError`
carries them all and prints one line each.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable

import attrs

_SHOWN_CHARACTERS = 48  # of a given value; the place tells where to read the rest


class Nothing(enum.Enum):
    """The value of a problem that no single value caused; one object, also after a trip through pickle."""

    NOTHING = "nothing"


NOTHING = Nothing.NOTHING
_SOURCE_NAMES = {"dict": "the config dict", "<json>": "the config text"}


def shown(value: object) -> str:
    """`value` as JSON, the way it was typed, cut to fit a line."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


@attrs.frozen(kw_only=True)
class Place:
    """Position of a value in its source; line and column count from 1, and 0 means that the source has none."""

    source: str = "dict"  # a file as the user named it, "<json>" for JSON text, "dict"
    line: int = 0
    column: int = 0

    def origin(self) -> str:
        """Short form for tables and equations: `config.json:4`."""
        name = self.source.replace("\\", "/").rsplit("/", 1)[-1]
        return f"{name}:{self.line}" if self.line else name

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else ""


NOWHERE = Place()


@attrs.frozen(kw_only=True)
class Problem:
    """One thing that is wrong, in the words of the person who wrote it."""

    reason: str  # why it cannot be
    key: str = ""  # dotted path, "zero_optimization.stage"; "" for the source as a whole
    given: object = NOTHING  # the value as typed
    suggestion: str = ""  # a sentence that says what to write instead
    place: Place = NOWHERE

    def __str__(self) -> str:
        has_value = self.key and self.given is not NOTHING
        what = f"{self.key} = {shown(self.given)}" if has_value else self.key
        head = "  ".join(part for part in (str(self.place), what) if part)
        tail = f"{self.reason}. {self.suggestion}" if self.suggestion else self.reason
        return f"{head}: {tail}" if head else tail


class ConfigError(ValueError):
    """A config that cannot be used; `problems` holds every reason, in the order of the source."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        ordered = sorted(problems, key=lambda problem: (problem.place.line, problem.place.column))
        self.source = source
        self.problems = tuple(ordered)
        super().__init__(self._text())

    def _text(self) -> str:
        """A heading and a line for each problem; one line when all that is wrong is the source itself."""
        count, name = len(self.problems), _SOURCE_NAMES.get(self.source, self.source)
        if count == 1 and not self.problems[0].key and not self.problems[0].place.line:
            return f"{name}: {self.problems[0]}"
        heading = f"{name}: {count} problem{'s' if count != 1 else ''}"
        return "\n  ".join([heading, *map(str, self.problems)])

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, tuple[Problem, ...]]]:
        """Survives the trip from a rank process: the arguments, not the joined text."""
        return type(self), (self.source, self.problems)
