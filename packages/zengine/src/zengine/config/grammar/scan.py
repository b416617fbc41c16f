"""JSON with the line and column of every key; comments and trailing commas are skipped.

The standard parser drops positions, silently keeps the last of two equal keys, and stops at the first mistake.  This
scanner records a `Place` for each key path and reports repeated keys with both lines.  Anything else that is not JSON
ends the scan, because guesses about structure cause false reports.

DeepSpeed reads configs with the hjson package, whose dialect also has keys and text without quotes.  Only a document
that this scanner rejects is given to that package (54 kB of Python, imported then): it knows no positions, so JSON,
with comments or without, keeps its lines in errors.  Rejected: hjson for every document (no lines; `"stage": 2 3` and
`"enabled": True,` become text), the dialect in this scanner (multi-line text and text without quotes double it), and
a patched `json.JSONDecoder` (its C scanner has no hook for positions).  Text of HJSON that looks like a slip in JSON
(it ends with a comma, or is Python's True, False or None) is reported as such.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Iterator
from typing import Any

import attrs

from zengine.config.grammar.errors import Place, Problem

Path = tuple[str | int, ...]

MAX_DEPTH = 64  # nesting of objects and lists; a valid config needs six
_BLANK = re.compile(r"[ \t\r\n]*")
_COMMENT = re.compile(r"//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?(?![0-9A-Za-z_.])")
_WORD = re.compile(r"[^\s,:\[\]{}]+")
_LITERALS = {"true": True, "false": False, "null": None}
_FOREIGN = {
    "True": "true",
    "False": "false",
    "None": "null",
    "NaN": "a number",
    "Infinity": "a number",
    "-Infinity": "a number",
}


def dotted(path: Path) -> str:
    """Format a path: `("a", "b", 2)` -> `a.b[2]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


@attrs.frozen(kw_only=True)
class Document:
    """Plain data with the place of each key."""

    source: str
    data: object
    places: dict[Path, Place]
    problems: tuple[Problem, ...] = ()

    def place(self, path: Path) -> Place:
        """Return the place of the key, or of the innermost enclosing section that has one."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return Place(source=self.source)


class _Stop(Exception):
    """Raised where the text stops being JSON; the problem is already recorded."""


class _TooDeep(_Stop):
    """Raised at a nesting that no dialect is read with."""


def scan(text: str, source: str) -> Document:
    """Parse JSON text, else HJSON.  Does not raise for bad text: the document carries the problems."""
    scanner, data = _Scanner(text, source), None
    try:
        data = scanner.document()
    except _Stop as stop:
        if not isinstance(stop, _TooDeep) and (document := _from_hjson(text, source)):
            return document
    return Document(source=source, data=data, places=scanner.places, problems=tuple(scanner.problems))


def _from_hjson(text: str, source: str) -> Document | None:
    """Return the document of an HJSON text, without places; None if it is none, or looks like JSON with a slip."""
    try:
        import hjson
    except ImportError:  # installed without zengine's dependencies
        return None
    problems: list[Problem] = []

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        names = [name for name, _ in pairs]
        twice = [name for name in found if names.count(name) > 1]
        problems.extend(Problem(key=name, reason="given twice", suggestion="Keep one of them.") for name in twice)
        return found

    try:
        data = hjson.loads(text, object_pairs_hook=members)
        is_one = isinstance(data, dict) and bool(data) and not any(map(_is_slip, _texts(data)))
    except (ValueError, LookupError, RecursionError):  # LookupError: hjson's for a comment without an end
        return None
    if not is_one:
        return None
    return Document(source=source, data=data, places={}, problems=tuple(problems))


def _texts(data: object) -> Iterator[str]:
    """Yield every text in plain data."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, (dict, list)):
        for member in data.values() if isinstance(data, dict) else data:
            yield from _texts(member)


def _is_slip(text: str) -> bool:
    return text in _FOREIGN or text.endswith(",")


class _Scanner:
    """One pass over the text.  Invariant: `at` is the offset of the next unread character."""

    def __init__(self, text: str, source: str) -> None:
        self.text = text
        self.source = source
        self.at = 0
        self.places: dict[Path, Place] = {}
        self.problems: list[Problem] = []
        self.line_starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def document(self) -> object:
        value = self.value(())
        if self.peek():
            raise self.stop(f"unexpected {self.word()} after the end of the object")
        return value

    def value(self, path: Path) -> object:
        if len(path) > MAX_DEPTH:
            self.problems.append(Problem(place=self.here(), reason=f"nested deeper than {MAX_DEPTH} levels"))
            raise _TooDeep
        opening = self.peek()
        if opening == "{":
            return self.members(path)
        if opening == "[":
            return self.items(path)
        if opening == '"':
            return self.string()
        return self.scalar()

    def members(self, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self.at += 1
        while not self.closes("}"):
            if self.peek() != '"':
                raise self.stop(f"expected a key in double quotes, found {self.word()}")
            place = self.here()
            name = self.string()
            if name in found:
                first = self.places[(*path, name)]
                self.report(
                    place,
                    f"given twice, on lines {first.line} and {place.line}",
                    "Keep one of them.",
                    dotted((*path, name)),
                )
            self.places.setdefault((*path, name), place)
            if self.peek() != ":":
                raise self.stop(f'expected ":" after the key "{name}", found {self.word()}')
            self.at += 1
            found[name] = self.value((*path, name))
            self.separator("}")
        return found

    def items(self, path: Path) -> list[Any]:
        found: list[Any] = []
        self.at += 1
        while not self.closes("]"):
            self.places[(*path, len(found))] = self.here()
            found.append(self.value((*path, len(found))))
            self.separator("]")
        return found

    def closes(self, bracket: str) -> bool:
        if self.peek() != bracket:
            return False
        self.at += 1
        return True

    def separator(self, bracket: str) -> None:
        """Consume a comma, or nothing before the closing bracket."""
        if self.peek() == bracket:
            return
        if self.peek() != ",":
            raise self.stop(f'expected "," or "{bracket}", found {self.word()}')
        self.at += 1

    def string(self) -> str:
        match = _STRING.match(self.text, self.at)
        if match is None:
            raise self.stop("invalid text: it does not end on its line, or has a backslash escape that JSON lacks")
        self.at = match.end()
        return str(json.loads(match.group()))

    def scalar(self) -> object:
        match = _NUMBER.match(self.text, self.at)
        if match is not None:
            self.at = match.end()
            is_whole = match.group(1) is None and match.group(2) is None
            return int(match.group()) if is_whole and len(match.group()) < 400 else float(match.group())
        match = _WORD.match(self.text, self.at)
        word = match.group() if match else ""
        if match is not None and word in _LITERALS:
            self.at = match.end()
            return _LITERALS[word]
        hint = f"; JSON writes {_FOREIGN[word]}" if word in _FOREIGN else ""
        raise self.stop(f"expected a value, found {self.word()}{hint}")

    def peek(self) -> str:
        """Return the next significant character, "" at the end; skip comments."""
        while True:
            blank = _BLANK.match(self.text, self.at)
            self.at = blank.end() if blank else self.at
            comment = _COMMENT.match(self.text, self.at)
            if comment is None:
                return self.text[self.at : self.at + 1]
            self.at = comment.end()

    def word(self) -> str:
        """Return the next word, for a message."""
        match = _WORD.match(self.text, self.at)
        return (match.group()[:40] if match else self.text[self.at : self.at + 1]) or "the end of the text"

    def here(self) -> Place:
        line = bisect.bisect_right(self.line_starts, self.at)
        column = self.at - self.line_starts[line - 1] + 1
        return Place(source=self.source, line=line, column=column)

    def report(self, place: Place, reason: str, suggestion: str, key: str = "") -> None:
        self.problems.append(Problem(place=place, key=key, reason=reason, suggestion=suggestion))

    def stop(self, reason: str) -> _Stop:
        self.problems.append(Problem(place=self.here(), reason=reason))
        return _Stop()
