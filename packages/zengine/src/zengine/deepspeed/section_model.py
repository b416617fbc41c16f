"""Sections of the config as DeepSpeed's classes: `DeepSpeedZeroConfig(stage=3).prefetch_bucket_size`.

DeepSpeed's config classes are pydantic models.  A class here names a section of our table of keys (config/keys/) and
reads its arguments by the rows: kinds, old names, "auto", unknown keys and the texts of errors are those of a config.
What a class adds is DeepSpeed's default of the keys whose default, or effect, differs here.

The objects describe a section as DeepSpeed would hold it.  An engine reads its config itself (`engine.plan`).

Rejected: pydantic models (a required dependency, and a second table).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from zengine.config import ConfigError, Problem
from zengine.config.grammar.table import Key, Row, Section, Support
from zengine.config.reading.structure import read_section

__all__ = ["SectionModel", "invalid"]


class SectionModel:
    """Section of the config with DeepSpeed's attributes and defaults.

    Arguments are the section's keys.  Assignments are checked like arguments.

    Raises pydantic.ValidationError if pydantic is imported, else ConfigError (both are ValueErrors), for an unknown
    key or a wrong value; AssertionError if a key is given under an old and its new name.
    """

    rows: ClassVar[Section]
    defaults: ClassVar[Mapping[str, Any]] = {}  # DeepSpeed's, where the rows have another one, or none
    models: ClassVar[Mapping[str, type[SectionModel]]] = {}  # classes of inner sections
    attributes: ClassVar[Mapping[str, str]] = {}  # keys whose attribute has another name
    title: ClassVar[str] = ""  # name of the section in messages

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # any key of the section

    def __init__(self, strict: bool = False, **data: Any) -> None:
        given = {name: value for name, value in data.items() if strict or value != "auto"}
        self._refuse_both_names(given)
        reading = read_section(self.rows, {name: self._plain(name, given[name]) for name in given}, self.title)
        if reading.problems:
            raise invalid(type(self).__name__, reading.problems)
        vars(self).update({self._field(name): self._value(name, reading.members) for name in self._names()})
        self.model_fields_set = {self._field(name) for name in reading.members}
        self.model_notices = reading.notices

    @classmethod
    def _names(cls) -> list[str]:
        """Return the present names of the section's keys."""
        rows = cls.rows.keys.items()
        return [name for name, row in rows if isinstance(row, Section) or row.support is not Support.RENAMED]

    def _plain(self, name: str, value: Any) -> Any:
        """Return an argument as plain data."""
        if name in self.models and isinstance(value, Mapping):
            value = self.models[name](**value)
        return value.given() if isinstance(value, SectionModel) else value

    def _value(self, name: str, members: Mapping[str, Any]) -> Any:
        """Return the value of one key; `members` are the given ones."""
        row, given = self.rows.keys[name], members.get(name)
        if isinstance(row, Section):
            made = self.models.get(name)
            if made is None or given is None:
                return given if made is None or name not in self.defaults else self.defaults[name]()
            return made(**given)
        if given is None:
            return self.defaults.get(name, row.default if row.support is Support.HONOURED else _matching(row))
        return row.kind.read(given)

    def _refuse_both_names(self, given: Mapping[str, Any]) -> None:
        for name in given:
            row = self.rows.keys.get(name)
            is_old = isinstance(row, Key) and row.support is Support.RENAMED
            if is_old and row.target[0] in self.models and row.target[0] in given:  # type: ignore[union-attr]
                raise AssertionError(
                    f"Cannot provide deprecated parameter '{name}' and replacing parameter '{row.target[0]}' together"  # type: ignore[union-attr]
                )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) and not name.startswith("model_"):
            value = vars(type(self)(**{**self.given(), name: value}))[name]
            self.model_fields_set.add(name)
        elif not name.startswith("model_"):
            raise AttributeError(f"{type(self).__name__} has no field {name!r}; it has {', '.join(self._fields())}")
        vars(self)[name] = value

    def _fields(self) -> list[str]:
        return [self._field(name) for name in self._names()]

    @classmethod
    def _field(cls, name: str) -> str:
        """Return DeepSpeed's attribute for a key: "stage3_max_live_parameters" is `max_live_parameters`."""
        short = name.removeprefix("stage3_")
        row = cls.rows.keys.get(short)
        is_other_name = isinstance(row, Key) and row.support is Support.RENAMED and row.target == (name,)
        return cls.attributes.get(name, short if is_other_name else name)

    def given(self) -> dict[str, Any]:
        """Return the fields that were given, as plain values."""
        found = {name: vars(self)[name] for name in self._fields() if name in self.model_fields_set}
        return {name: value.given() if isinstance(value, SectionModel) else value for name, value in found.items()}

    def model_dump(self) -> dict[str, Any]:
        """Return all fields, inner sections as dicts."""
        found = {name: vars(self)[name] for name in self._fields()}
        return {
            name: value.model_dump() if isinstance(value, SectionModel) else value for name, value in found.items()
        }

    dict = model_dump

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        values = {self._field(name): (self.rows.keys[name], vars(self)[self._field(name)]) for name in self._names()}
        shown = {name: "(hidden)" if _is_secret(row) and value else value for name, (row, value) in values.items()}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def _is_secret(row: Row) -> bool:
    return isinstance(row, Key) and row.is_secret


def _matching(row: Key) -> Any:
    return row.matching[0] if row.matching else None


def invalid(title: str, problems: Iterable[Problem]) -> ValueError:
    """Return the error for wrong arguments; pydantic's, if the caller may catch that."""
    core = sys.modules.get("pydantic_core")
    if core is None:
        return ConfigError(title, problems)
    lines = [
        {
            "type": core.PydanticCustomError("config", str(problem).replace("{", "{{").replace("}", "}}")),
            "loc": tuple(problem.key.split(".")[1:]),
            "input": None,
        }
        for problem in problems
    ]
    error: ValueError = core.ValidationError.from_exception_data(title, lines)
    return error
