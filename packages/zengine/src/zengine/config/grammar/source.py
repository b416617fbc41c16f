"""Sources of a config: a file, JSON text as it is or in base64, or a mapping.

Each becomes a `Document`.  A file is read as UTF-8 with or without a byte-order mark.  Base64 is how launchers pass a
config on a command line; a file of that name takes precedence.  A mapping is copied, so the caller may change it
afterwards; enums are read as their values, torch's dtypes as their names, paths as text, and numpy's numbers as
Python's.  Another value that JSON cannot represent is rejected with its key.
"""

from __future__ import annotations

import base64
import binascii
import enum
import math
import numbers
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zengine.config.grammar.errors import NOTHING, ConfigError, Problem
from zengine.config.grammar.scan import MAX_DEPTH, Document, dotted, scan
from zengine.config.grammar.scan import Path as KeyPath
from zengine.config.grammar.suggest import nearest

Source = str | os.PathLike[str] | Mapping[str, Any] | Document
# Objects of a process, in sections where DeepSpeed takes them: read as the names of their types.
_OBJECTS = (("tp", "mpu"), ("tp", "tp_group"))
_MAX_BITS = 1024  # of an integer; a larger one is read as infinity, as the scanner does


def read(source: Source) -> Document:
    """Return the document of a path, a JSON text that starts with "{" or is that in base64, or a mapping.

    A document is returned as is.

    Raises ConfigError if the file cannot be read, TypeError for other kinds of source.
    """
    if isinstance(source, Document):
        return source
    if isinstance(source, Mapping):
        return _from_mapping(source)
    if isinstance(source, str) and source.lstrip("\ufeff \t\r\n").startswith("{"):
        return scan(source.lstrip("\ufeff"), "<json>")
    if isinstance(source, str) and (text := _from_base64(source)):
        return scan(text, "<base64>")
    if isinstance(source, (str, os.PathLike)):
        return _from_file(source)
    raise TypeError(
        f"config is {source!r} ({type(source).__name__}); give a path to a JSON file, a dict or JSON text"
    )


def _from_base64(source: str) -> str:
    """Return the text of an object in base64, of either alphabet; "" for anything else."""
    if os.path.exists(source):
        return ""
    try:
        text = base64.b64decode(source.strip().translate(str.maketrans("-_", "+/")), validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return ""
    return text if text.lstrip().startswith("{") else ""


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
    copying = _Copying()
    data = copying.plain(source, ())
    return Document(source="dict", data=data, places={}, problems=tuple(copying.problems))


class _Copying:
    """One deep copy of a mapping to JSON's types.  Invariant: `open` has the containers around the present value."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.open: list[int] = []  # their ids

    def plain(self, value: Any, path: KeyPath) -> Any:
        """Return a copy of `value`; infinity passes, since integrations write it for "never"."""
        if isinstance(value, enum.Enum):
            value = value.value
        if isinstance(value, (Mapping, list, tuple)):
            return self.container(value, path)
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, numbers.Integral):
            whole = int(value)
            return whole if whole.bit_length() < _MAX_BITS else math.inf * (1 if whole > 0 else -1)
        if isinstance(value, numbers.Real) and not math.isnan(value):
            return float(value)
        if _is_dtype(value):
            return str(value)
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if path[-2:] in _OBJECTS:
            return type(value).__name__
        self.report(path, "is not a JSON value", _json_hint(value), given=value)
        return None

    def container(self, value: Any, path: KeyPath) -> Any:
        if id(value) in self.open:
            self.report(path, "contains itself", "Remove it.")
            return None
        if len(path) > MAX_DEPTH:
            self.report(path, f"nested deeper than {MAX_DEPTH} levels", "Remove it.")
            return None
        self.open.append(id(value))
        try:
            if not isinstance(value, Mapping):
                return [self.plain(member, (*path, index)) for index, member in enumerate(value)]
            for name in (name for name in value if not isinstance(name, str)):
                self.report(path, f"the key {name!r} is a Python {type(name).__name__}, not text")
            return {name: self.plain(each, (*path, name)) for name, each in value.items() if isinstance(name, str)}
        finally:
            self.open.pop()

    def report(self, path: KeyPath, reason: str, suggestion: str = "", given: object = NOTHING) -> None:
        self.problems.append(Problem(key=dotted(path), given=given, reason=reason, suggestion=suggestion))


def _is_dtype(value: object) -> bool:
    """Return whether a value is a dtype of torch, which is imported if there is one."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.dtype)


def _json_hint(value: object) -> str:
    kind = type(value).__name__
    return f"A Python {kind} cannot be written to a file; give a number, text, true/false, null, list or object."
