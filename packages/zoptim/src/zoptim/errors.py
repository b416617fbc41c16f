"""Errors of zoptim, all subclasses of ValueError or TypeError, and spelling hints for their messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UnknownNameError(ValueError):
    """An unknown optimizer, schedule or option name."""


class BaseShapesMissingError(ValueError):
    """A parameter of MuAdam, MuAdamW or MuSGD without a base shape of the package mup."""


class UnsupportedTensorError(TypeError):
    """A parameter or gradient that the optimizers do not support: sparse, complex."""


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" with the nearest allowed names, or "" if none is near.

    Names one typing error away come first: difflib's ratio is too low for words as short as "lr".
    """
    by_folded = {name.lower(): name for name in sorted(allowed)}
    typed = str(given).lower()
    near = [name for name in by_folded if _is_one_slip(typed, name)][:3]
    near = near or difflib.get_close_matches(typed, by_folded, n=1, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(by_folded[name]) for name in near)}?" if near else ""


def _is_one_slip(typed: str, name: str) -> bool:
    """Return whether `name` is one omitted, added, changed or swapped letter away."""
    start = next((at for at, (a, b) in enumerate(zip(typed, name)) if a != b), min(len(typed), len(name)))
    typed, name = typed[start:], name[start:]
    swapped = typed[1:2] + typed[:1] + typed[2:]
    return name in (typed[1:], swapped) or typed[1:] == name[1:] or typed == name[1:]
