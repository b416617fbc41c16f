"""Text formatting: sections, aligned columns, sizes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

__all__ = ["columns", "gib", "ranks", "section", "wrapped"]

_WIDTH = 110


def gib(num_bytes: float) -> str:
    """Format bytes in GiB, below 0.1 GiB in MiB."""
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:,.1f} MiB"


def ranks(count: int) -> str:
    """Format a number of ranks."""
    return f"{count} rank{'s' if count != 1 else ''}"


def section(title: str, lines: Sequence[str]) -> str:
    """Format a title and indented lines."""
    return "\n".join([title, *(f"  {line}".rstrip() for line in lines)])


def columns(table: Sequence[tuple[str, ...]], right: int = 0) -> list[str]:
    """Align rows; columns from `right` on (0: none, negative: from the end) are right-aligned."""
    if not table:
        return []
    num = len(table[0])
    first = right % num if right else num
    widths = [max(len(row[column]) for row in table) for column in range(num)]

    def cell(row: tuple[str, ...], column: int) -> str:
        return row[column].rjust(widths[column]) if column >= first else row[column].ljust(widths[column])

    return ["  ".join(cell(row, column) for column in range(num)).rstrip() for row in table]


def wrapped(text: str) -> Iterator[str]:
    """Yield the lines of a bullet item."""
    lines = textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
    yield from (f"{'-' if index == 0 else ' '} {line}" for index, line in enumerate(lines))
