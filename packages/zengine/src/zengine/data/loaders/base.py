"""Loaders with a position that can be saved.

    loader = make_loader(dataset, micro_batch_size=4, rank=0, world_size=1, seed=1, drop_last=True)
    for batch in loader: ...          # from the position to the end of the epoch
    for batch in forever(loader): ... # across epochs, without end
    state = loader.state_dict()       # JSON-able; load_state_dict continues with the very next batch

The position counts batches that the loop received, not those that workers prefetched.  `iter` continues from it:
leaving a loop in the middle of an epoch and iterating again continues that epoch.  After the last batch of an epoch
the position is the start of the next one, with a new shuffle.  Only one iteration is active at a time; an older one
raises StaleIterationError instead of moving the position of the newer one.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from zengine.data.loaders.fetch import BatchFetcher
from zengine.trial_load import trial_load

_END = object()
_MOST = 2**62
PostProcess = Callable[[Any, Mapping[str, Any]], Any]


class StaleIterationError(RuntimeError):
    """Iteration that was superseded by a newer one or by loading a position."""


class Loader(ABC):
    """Iterates from its position to the end of the epoch; subclasses define the position."""

    dataset: Any  # as given
    batch_size: int  # samples of this rank in a batch: the micro-batch size
    epoch: int  # passes completed
    consumed_samples: int  # samples of this epoch that all ranks together have received
    marked: dict[str, Any]  # `state_dict` at the last `mark`, load or first iteration; {} before
    post_process: PostProcess | None  # (batch, position after it) -> what the loop receives; None: the batch

    def __init__(self, dataset: Any, batch_size: int, fetcher: BatchFetcher) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.epoch = 0
        self.consumed_samples = 0
        self.marked = {}
        self.post_process = None
        self._fetcher = fetcher
        self._active: object = None  # token of the iteration that may move the position
        self.waiting: AbstractContextManager[None] = nullcontext()  # around the wait for a batch; set by telemetry

    def __iter__(self) -> Iterator[Any]:
        active = self._active = object()
        self.marked = self.marked or copy.deepcopy(self.state_dict())  # a dataset may return a state that moves
        batches = self._open()
        while True:
            if self._active is not active:
                raise StaleIterationError(
                    "this iteration of the loader has ended: a newer one began or a position was loaded. "
                    "Call iter(loader) again, or use forever(loader), which follows the position"
                )
            with self.waiting:
                batch = next(batches, _END)
            if batch is _END:
                break
            self._advance()
            yield batch if self.post_process is None else self.post_process(batch, self.state_dict())
        self._finish_epoch()

    @property
    def collate_fn(self) -> Callable[[list[Any]], Any]:
        """Function that joins samples to a batch."""
        return self._fetcher.collate_fn

    def mark(self) -> None:
        """Note the position at the end of a step, for a save within the next step."""
        if self.marked:
            self.marked = copy.deepcopy(self.state_dict())

    def set_accumulation(self, accumulation: int) -> None:  # noqa: B027 - the identity by default
        """Set the micro-steps per step, for loaders whose batches depend on the step."""

    def fingerprint(self) -> list[str]:
        """Return the lines that must be equal on all ranks for their batches to match."""
        return []

    @abstractmethod
    def __len__(self) -> int:
        """Return the batches of this rank in a whole epoch, independent of the position."""

    @abstractmethod
    def epochs_done(self) -> float:
        """Return the passes over the data so far, plus the fraction of the current one if its length is known."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position, JSON-able."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position; an active iteration ends with StaleIterationError.

        Raises ValueError, and changes nothing, if the state is invalid.
        """
        self.prepare_load(state)()

    def prepare_load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a position without changing anything; return a function that moves there and cannot fail."""
        move = self._prepare(state)

        def commit() -> None:
            move()
            self._active = None
            self.marked = dict(state)

        return commit

    @abstractmethod
    def _open(self) -> Iterator[Any]:
        """Return the batches from the position to the end of the epoch."""

    @abstractmethod
    def _prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Return the function that moves to the position.  Raises ValueError if the state is invalid."""

    @abstractmethod
    def _advance(self) -> None:
        """Advance the position by one batch."""

    @abstractmethod
    def _finish_epoch(self) -> None:
        """Handle the end of the epoch."""


def read_counts(state: Mapping[str, Any], *names: str) -> list[int]:
    """Return the counts `names` of a saved state.  Raises ValueError unless each is an integer in 0..2**62."""
    if not isinstance(state, Mapping):
        raise ValueError(f"loader state: load_state_dict takes a dict of numbers, got {type(state).__name__}")
    missing = [name for name in names if name not in state]
    if missing:
        raise ValueError(
            f"loader state: {missing[0]} is missing; the state has {', '.join(map(str, state)) or 'nothing'}. If it "
            "was saved by another kind of loader, restore the config's data sections, or load only the weights "
            "(load_module_only=True)"
        )
    for name in names:
        value = state[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
            raise ValueError(
                f"loader state: {name} must be an integer in 0..2**62, got {value!r}; "
                f"the state has {', '.join(map(str, state))}"
            )
    return [state[name] for name in names]


def check_below(name: str, value: int, limit: int, what: str) -> None:
    """Raise ValueError unless a number of a saved state is below `limit`."""
    if value >= limit:
        raise ValueError(f"loader state: {name} is {value}, which is not below the {limit} {what}")


def do_nothing() -> None:
    """Commit nothing, for a source without state."""


def prepare_restore(holder: Any, state: Any, name: str) -> Callable[[], None]:
    """Prepare the restore of a user's sampler or dataset; its errors become a ValueError that names it."""
    try:
        return trial_load(holder, state)
    except Exception as error:  # user code
        raise ValueError(
            f"loader state: {name}: {type(holder).__name__}.load_state_dict raised {type(error).__name__}: {error}"
        ) from error


@final
class RepeatingLoader:
    """Iterates over a loader repeatedly; with our loaders each pass is the next epoch.

    Follows a position that is loaded during the iteration.  Raises ValueError if a pass yields no batch (an exhausted
    iterator, say), since the loop would never end.
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
                "can be used only once"
            ) from None


def forever(loader: Iterable[Any]) -> RepeatingLoader:
    """Return an endless iterator over the epochs of `loader`."""
    return RepeatingLoader(loader)
