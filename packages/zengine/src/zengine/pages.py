"""Pages of the documentation site that explain errors.

An error class marked with `explained` carries a link as a note (PEP 678): Python prints it below the message in a
traceback, `print(error)` and tests of messages see the message alone.  The address of the site and every page are
here, once; a test compares them with `docs/`.  Only errors of the config and of the engine have one, where a page
says more than the message does.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Page", "explained", "with_notes"]

SITE = "https://zstar.example/docs"

E = TypeVar("E", bound=type[BaseException])


class Page(enum.Enum):
    """Pages, below the address of the site, with the heading that explains."""

    CONFIG = "reference/config.html"
    CALL_ORDER = "tutorials/debugging.html#calls-in-a-wrong-order"
    OUT_OF_MEMORY = "tutorials/debugging.html#out-of-memory"
    NOT_FINITE = "tutorials/debugging.html#a-nan-or-an-overflow"
    RANKS_DISAGREE = "tutorials/debugging.html#ranks-that-disagree"
    CHECKPOINTS = "tutorials/checkpoints.html"
    DECODERS = "tutorials/inference.html#which-models"


def explained(page: Page) -> Callable[[E], E]:
    """Return a decorator of error classes: instances, and those of subclasses, end in a link to `page`.

    >>> @explained(Page.CONFIG)
    ... class Wrong(ValueError): ...
    >>> Wrong("typo").__notes__
    ['See https://zstar.example/docs/reference/config.html']
    """

    def mark(error: E) -> E:
        inherited: Any = error.__init__

        @functools.wraps(inherited)
        def init(self: BaseException, *args: Any, **kwargs: Any) -> None:
            inherited(self, *args, **kwargs)
            self.add_note(f"See {SITE}/{page.value}")

        setattr(error, "__init__", init)  # noqa: B010 (mypy forbids the assignment)
        return error

    return mark


def with_notes(error: BaseException) -> str:
    """Return the message and the notes of an error, as a traceback ends."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])
