"""Patterns over names of modules: `*` is one component or a part of one, `**` any number of them."""

from __future__ import annotations

import re

__all__ = ["matches"]


def matches(pattern: str, name: str) -> bool:
    """Whether all of `name` is what `pattern` says."""
    parts = re.split(r"(\*\*|\*)", pattern)
    expression = "".join({"**": ".*", "*": "[^.]*"}.get(part, re.escape(part)) for part in parts)
    return re.fullmatch(expression, name) is not None
