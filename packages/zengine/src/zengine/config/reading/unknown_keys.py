"""Unknown keys: the key that was probably meant, and the section where it belongs."""

from __future__ import annotations

import inspect
from functools import lru_cache

import zoptim
from zengine.config.grammar.suggest import look_alike, nearest, one_of
from zengine.config.grammar.table import Section, walk
from zengine.config.keys.root import ROOT

_LISTED = 12  # keys of a small section that are worth naming when nothing is near


def _classes() -> dict[str, tuple[type, ...]]:
    """Whose arguments are options; looked up when somebody has slipped, so that they need not be imported before."""
    return {
        "optimizer.params": (
            zoptim.AdamW,
            zoptim.SGD,
            zoptim.Adagrad,
            zoptim.LAMB,
            zoptim.Lion,
            zoptim.Muon,
            zoptim.Adafactor,
        ),
        "scheduler.params": (zoptim.WarmupDecayLR, zoptim.WarmupCosineLR, zoptim.OneCycle, zoptim.LRRangeTest),
    }


@lru_cache(maxsize=1)
def _homes() -> dict[str, tuple[str, ...]]:
    """Key name -> the sections that know it, "" being the top level."""
    homes: dict[str, list[str]] = {}
    for path, _ in walk(ROOT):
        if "*" not in path:
            homes.setdefault(path[-1], []).append(".".join(path[:-1]))
    for home, known in _classes().items():
        for name in {name for made in known for name in inspect.signature(made).parameters}:
            homes.setdefault(name, []).append(home)
    return {name: tuple(sections) for name, sections in homes.items()}


def _belongs(name: str) -> str:
    """A sentence with the section where a key belongs; "" if no section has it, or too many do."""
    homes = _homes().get(name, ())
    if not homes or len(homes) > 3:
        return ""
    where = "at the top level" if homes == ("",) else f"under {one_of(home or 'the top level' for home in homes)}"
    return f'"{name}" belongs {where}.'


def meant(name: str, section: Section) -> str:
    """A sentence for a key that `section` does not know."""
    elsewhere = _belongs(name)
    close = nearest(name, section.keys, tolerance=1)
    if not close and not elsewhere:
        close = nearest(name, section.keys, tolerance=2 if len(name) > 5 else 1)
        close = close or look_alike(name, section.keys) or nearest(name, section.keys)
    if close or elsewhere:
        question = f"Did you mean {one_of(close[:3])}?" if close else ""
        return " ".join(part for part in (question, elsewhere) if part)
    far = nearest(name, _homes(), tolerance=max(1, len(name) // 5))
    if len(far) == 1 and _belongs(far[0]):
        return f'Did you mean "{far[0]}"? {_belongs(far[0])}'
    if len(section.keys) <= _LISTED:
        return f"Known keys here: {', '.join(section.keys)}."
    return "No known key is near: remove it."
