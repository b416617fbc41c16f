"""Suggestions for misspelt names.

The distance is the number of edits: a letter left out, added, changed, or swapped with its neighbour.  Rejected:
`difflib` alone, whose ratio prefers a long common substring over few edits, so it finds `max_lr` for `mx_lr` only by
chance; it is the fallback if no name is near.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def edit_distance(left: str, right: str, limit: int) -> int:
    """Return the optimal string alignment distance; any number above `limit` if it exceeds that."""
    while left and right and left[0] == right[0]:
        left, right = left[1:], right[1:]
    while left and right and left[-1] == right[-1]:
        left, right = left[:-1], right[:-1]
    if abs(len(left) - len(right)) > limit:
        return limit + 1
    oldest: list[int] = []
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        oldest, before, row = before, row, [i]
        for j, b in enumerate(right, 1):
            best = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                best = min(best, oldest[j - 2] + 1)
            row.append(best)
        if min(row) > limit and min(before) > limit:
            return limit + 1
    return row[-1]


def _plain(name: str) -> str:
    """Normalize a name: lower case, underscores for dashes, no surrounding blanks."""
    return name.lower().replace("-", "_").strip()


def nearest(name: str, names: Iterable[str], tolerance: int | None = None) -> list[str]:
    """Return the names with the fewest edits, all of them on a tie; [] if none is near."""
    typed = _plain(name)
    limit = max(1, len(typed) // 3) if tolerance is None else tolerance
    candidates = [known for known in names if abs(len(known) - len(typed)) <= limit]
    distances = {known: edit_distance(typed, _plain(known), limit) for known in candidates}
    best = min(distances.values(), default=limit + 1)
    return [known for known, distance in distances.items() if distance == best <= limit]


def look_alike(name: str, names: Iterable[str]) -> list[str]:
    """Return a name that contains this one or shares long substrings with it; [] if there is none."""
    names, typed = list(names), _plain(name)
    holding = [known for known in names if len(typed) > 3 and typed in known]
    return holding[:1] or difflib.get_close_matches(typed, names, n=1, cutoff=0.75)


def one_of(names: Iterable[str], joint: str = "or") -> str:
    """Join quoted names: `"a", "b" or "c"`."""
    quoted = [f'"{name}"' for name in names]
    return f" {joint} ".join(part for part in (", ".join(quoted[:-1]), quoted[-1]) if part)
