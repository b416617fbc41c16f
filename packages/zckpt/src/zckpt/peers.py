"""Who takes part in a save.

This package imports no communication library: it takes any object with a rank, a world size and an `exchange` of
JSON values.  `ALONE` is the world of one, and the same code runs over it.
"""

from __future__ import annotations

from typing import Protocol, final

import attrs

from . import canonical
from .canonical import JSON


class Peers(Protocol):
    """The ranks that save or load one checkpoint together."""

    @property
    def rank(self) -> int:
        """This rank, 0 <= rank < world_size."""
        ...

    @property
    def world_size(self) -> int: ...

    def exchange(self, value: JSON) -> list[JSON]:
        """Every rank's value, in rank order.  Every rank calls it; raises if one does not come."""
        ...


@final
@attrs.frozen
class Alone:
    """A world of one; `exchange` still makes the JSON round trip, so that nothing works alone only."""

    rank: int = 0
    world_size: int = 1

    def exchange(self, value: JSON) -> list[JSON]:
        return [canonical.load(canonical.dump(value))]


ALONE = Alone()
