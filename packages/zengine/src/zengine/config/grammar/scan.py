"""JSON with the line and column of every key.

The standard parser drops positions, silently keeps the last of two equal keys, and stops at the first mistake.  This
scanner records a `Place` for each key path, reports repeated keys with both lines, and continues after the two common
mistakes from other formats, comments and trailing commas, so that one report contains all of them.  Anything else
that is not JSON ends the scan, because guesses about structure cause false reports.

Rejected: the hjson dialect (reads `stage: 2 3` as text), and a patched `json.JSONDecoder` (its C scanner has no hook
for positions).
"""

from __future__ import annotations

import bisect
import json
import re
from typing import Any

import attrs

from zengine.config.grammar.errors import Place, Problem

Path = tuple[str | int, ...]

_MAX_DEPTH = 64  # nesting of objects and lists; a valid config needs six
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


def scan(text: str, source: str) -> Document:
    """Parse JSON text.  Does not raise for bad text: the document carries the problems."""
    scanner = _Scanner(text, source)
    try:
        data = scanner.document()
    except _Stop:
        data = None
    return Document(source=source, data=data, places=scanner.places, problems=tuple(scanner.problems))


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
        if len(path) > _MAX_DEPTH:
            raise self.stop(f"nested deeper than {_MAX_DEPTH} levels")
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
        """Consume a comma, or nothing before the closing bracket; report and skip a trailing comma."""
        if self.peek() == bracket:
            return
        if self.peek() != ",":
            raise self.stop(f'expected "," or "{bracket}", found {self.word()}')
        place = self.here()
        self.at += 1
        if self.peek() == bracket:
            self.report(place, f'a comma before "{bracket}" is not JSON', "Remove the comma.")

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
        """Return the next significant character, "" at the end; report and skip comments."""
        while True:
            blank = _BLANK.match(self.text, self.at)
            self.at = blank.end() if blank else self.at
            comment = _COMMENT.match(self.text, self.at)
            if comment is None:
                return self.text[self.at : self.at + 1]
            self.report(self.here(), f"comments are not JSON: {comment.group()[:40]}", "Remove the comment.")
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
