"""Sources of a config: a file, JSON text, or a mapping.

Each becomes a `Document`.  A file is read as UTF-8 with or without a byte-order mark.  A mapping is copied, so the
caller may change it afterwards; a value that JSON cannot represent is rejected with its key.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zengine.config.grammar.errors import ConfigError, Problem
from zengine.config.grammar.scan import Document, dotted, scan
from zengine.config.grammar.scan import Path as KeyPath
from zengine.config.grammar.suggest import nearest

Source = str | os.PathLike[str] | Mapping[str, Any] | Document


def read(source: Source) -> Document:
    """Return the document of a path, a JSON text that starts with "{", or a mapping; a document is returned as is.

    Raises ConfigError if the file cannot be read, TypeError for other kinds of source.
    """
    if isinstance(source, Document):
        return source
    if isinstance(source, Mapping):
        return _from_mapping(source)
    if isinstance(source, str) and source.lstrip("\ufeff \t\r\n").startswith("{"):
        return scan(source.lstrip("\ufeff"), "<json>")
    if isinstance(source, (str, os.PathLike)):
        return _from_file(source)
    raise TypeError(
        f"config is {source!r} ({type(source).__name__}); give a path to a JSON file, a dict or JSON text"
    )


def _from_file(source: str | os.PathLike[str]) -> Document:
    name = os.fspath(source)
    if not name:
        raise _unreadable("config", "the path is empty", "Give the path of a JSON file, or a dict.")
    try:
        data = Path(name).read_bytes()
    except FileNotFoundError:
        raise _unreadable(name, f"no such file (working directory: {Path.cwd()})", _neighbour(name)) from None
    except IsADirectoryError:
        raise _unreadable(name, "is a folder, not a JSON file") from None
    except (OSError, ValueError) as error:
        raise _unreadable(name, f"cannot be read: {error}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _unreadable(name, f"is not UTF-8 text (line {line})", "Save it as UTF-8.") from None
    if not text.strip():
        raise _unreadable(name, "is empty", "The smallest config is {}.")
    return scan(text, name)


def _unreadable(name: str, reason: str, suggestion: str = "") -> ConfigError:
    return ConfigError(name, [Problem(reason=reason, suggestion=suggestion)])


def _neighbour(name: str) -> str:
    """Return a hint with the JSON file of the nearest name in the same folder; "" if there is none."""
    folder = Path(name).parent
    try:
        names = sorted(found.name for found in folder.glob("*.json"))
    except OSError:
        names = []
    close = nearest(Path(name).name, names)
    return f'Did you mean "{folder / close[0]}"?' if close else ""


def _from_mapping(source: Mapping[str, Any]) -> Document:
    problems: list[Problem] = []
    data = _plain(source, (), problems)
    return Document(source="dict", data=data, places={}, problems=tuple(problems))


def _plain(value: Any, path: KeyPath, problems: list[Problem]) -> Any:
    """Return a deep copy of JSON's types; infinity passes, since integrations write it for "never"."""
    if isinstance(value, Mapping):
        members = {}
        for name, member in value.items():
            if isinstance(name, str):
                members[name] = _plain(member, (*path, name), problems)
            else:
                reason = f"the key {name!r} is a Python {type(name).__name__}, not text"
                problems.append(Problem(key=dotted(path), reason=reason))
        return members
    if isinstance(value, (list, tuple)):
        return [_plain(member, (*path, index), problems) for index, member in enumerate(value)]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and not math.isnan(value):
        return float(value)
    problems.append(
        Problem(key=dotted(path), given=value, reason="is not a JSON value", suggestion=_json_hint(value))
    )
    return None


def _json_hint(value: object) -> str:
    kind = type(value).__name__
    if kind == "dtype":
        return 'Write the dtype as text: "fp32", "fp16" or "bf16".'
    return f"A Python {kind} cannot be written to a file; give a number, text, true/false, null, list or object."
