"""Endless iteration over a loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, final

from zengine.data.loaders.base import StaleIterationError


@final
class RepeatingLoader:
    """Iterates over a loader repeatedly; with our loaders each pass is the next epoch.

    Follows a position that is loaded meanwhile.  Raises ValueError if a pass yields nothing, as with an exhausted
    iterator, since such a loop would never end.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        """Return the batches in one pass."""
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except (StopIteration, StaleIterationError):
            self._batches = iter(self.loader)
        try:
            return next(self._batches)
        except StopIteration:
            raise ValueError(
                f"{type(self.loader).__name__} yields no batch when iterated again: it is empty, or an iterator that "
                f"can be used only once"
            ) from None


def forever(loader: Iterable[Any]) -> RepeatingLoader:
    """Return an endless iterator across epochs: `for batch in forever(loader)`."""
    return RepeatingLoader(loader)
