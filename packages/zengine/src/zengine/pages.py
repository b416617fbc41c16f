"""Pages of the documentation that explain errors.

An error class marked with `explained` says as a note (PEP 678) where more is written: Python prints it below the
message in a traceback, `print(error)` and tests of messages see the message alone.  Only errors of the config and of
the engine have one, where a page says more than the message does.

A note leads somewhere or says that it does not: as long as `SITE` is a placeholder (a name below .example), it names
the file of the repository that the page is made of, and not an address that no browser finds.  ZENGINE_DOCS is the
address or the folder of a site that was built or published elsewhere, and comes first.  `tools/release.py address`
sets `SITE`.  Rejected: the pages in the wheel (a megabyte, and Markdown with parts that only the site inserts).
"""

from __future__ import annotations

import enum
import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

__all__ = ["Page", "explained", "with_notes"]

SITE = "https://zstar.example/docs"
_VARIABLE = "ZENGINE_DOCS"

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

    @property
    def source(self) -> str:
        """The file of the repository that the page is made of, with its heading."""
        if self is Page.CONFIG:
            return "packages/zengine/CONFIG.md"  # docs/hooks.py
        return f"docs/pages/{self.value.replace('.html', '.md')}"


def where(page: Page) -> str:
    """Return the sentence that says where `page` is: below ZENGINE_DOCS, below `SITE`, or in the repository."""
    given = os.environ.get(_VARIABLE, "")
    if not given and (urlsplit(SITE).hostname or "").endswith(".example"):
        return (
            f"See {page.source} in the repository. {_VARIABLE}=ADDRESS or FOLDER of the built site makes this a link."
        )
    return f"See {(given or SITE).rstrip('/')}/{page.value}"


def explained(page: Page) -> Callable[[E], E]:
    """Return a decorator of error classes: instances, and those of subclasses, end in the place of `page`.

    >>> @explained(Page.CONFIG)
    ... class Wrong(ValueError): ...
    >>> Wrong("typo").__notes__ == [where(Page.CONFIG)]
    True
    """

    def mark(error: E) -> E:
        inherited: Any = error.__init__

        @functools.wraps(inherited)
        def init(self: BaseException, *args: Any, **kwargs: Any) -> None:
            inherited(self, *args, **kwargs)
            self.add_note(where(page))

        setattr(error, "__init__", init)  # noqa: B010 (mypy forbids the assignment)
        return error

    return mark


def with_notes(error: BaseException) -> str:
    """Return the message and the notes of an error, as a traceback ends."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])
