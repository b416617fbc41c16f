"""Loaders with a position that can be saved.

    loader = make_loader(dataset, micro_batch_size=4, rank=0, world_size=1, seed=1, drop_last=True)
    for batch in loader: ...          # from the position to the end of the epoch
    state = loader.state_dict()       # JSON-able; load_state_dict continues with the very next batch

The position counts batches handed to the caller, not those that workers prefetched.  `iter` continues from it:
leaving a loop in the middle of an epoch and iterating again continues that epoch.  After the last batch of an epoch
the position is the start of the next one, with a new shuffle.  Only one iteration is active at a time; an older one
raises StaleIterationError instead of moving the position of the newer one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from zengine.data.loaders.fetch import Fetching
from zengine.trial_load import trial_load

_END = object()
_MOST = 2**62
PostProcess = Callable[[Any, Mapping[str, Any]], Any]


class StaleIterationError(RuntimeError):
    """The iteration was superseded by a newer one or by loading a position."""


class Loader(ABC):
    """Iterates from its position to the end of the epoch; subclasses define the position."""

    dataset: Any  # as given
    batch_size: int  # samples of this rank in a batch: the micro-batch size
    epoch: int  # passes completed
    consumed_samples: int  # samples of this epoch handed to all ranks together
    post_process: PostProcess | None  # (batch, position behind it) -> what the caller gets; None: the batch

    def __init__(self, dataset: Any, batch_size: int, fetching: Fetching) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.epoch = 0
        self.consumed_samples = 0
        self.post_process = None
        self._fetching = fetching
        self._alive: object = None  # the iteration that may move the position
        self.waiting: AbstractContextManager[None] = nullcontext()  # around the wait for a batch; telemetry's

    def __iter__(self) -> Iterator[Any]:
        alive = self._alive = object()
        batches = self._open()
        while True:
            if self._alive is not alive:
                raise StaleIterationError(
                    "this iteration over the loader is over: a newer one began or a position was loaded since. "
                    "Call iter(loader) again, or use forever(loader), which follows the position"
                )
            with self.waiting:
                batch = next(batches, _END)
            if batch is _END:
                break
            self._handed()
            yield batch if self.post_process is None else self.post_process(batch, self.state_dict())
        self._ended()

    @property
    def collate_fn(self) -> Callable[[list[Any]], Any]:
        """Function that joins samples to a batch."""
        return self._fetching.collate_fn

    def set_accumulation(self, accumulation: int) -> None:  # noqa: B027 - the identity, not a duty
        """Set the micro-steps per step, for loaders whose batches depend on the step."""

    def fingerprint(self) -> list[str]:
        """Return facts, one per line, that must be equal on all ranks for their batches to match."""
        return []

    @abstractmethod
    def __len__(self) -> int:
        """Return the batches of this rank in a whole epoch, independent of the position."""

    @abstractmethod
    def epochs_done(self) -> float:
        """Return the passes over the data so far, with the fraction of the current one if its length is known."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position, JSON-able."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position; an active iteration ends with StaleIterationError.

        Raises ValueError, and changes nothing, if the state is invalid.
        """
        self.prepare_load(state)()

    def prepare_load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a position without changes; the returned function moves there and cannot fail."""
        move = self._prepare(state)

        def commit() -> None:
            move()
            self._alive = None

        return commit

    @abstractmethod
    def _open(self) -> Iterator[Any]:
        """Return the batches from the position to the end of the epoch."""

    @abstractmethod
    def _prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Return the function that moves to the position.  Raises ValueError if the state is invalid."""

    @abstractmethod
    def _handed(self) -> None:
        """Advance the position by one batch."""

    @abstractmethod
    def _ended(self) -> None:
        """Handle the end of the epoch."""


def whole_numbers(state: Mapping[str, Any], *names: str) -> list[int]:
    """Return named numbers of a saved state.  Raises ValueError for one missing or not an integer in 0..2**62."""
    if not isinstance(state, Mapping):
        raise ValueError(f"loader state: {type(state).__name__} is no state; load_state_dict takes a dict of numbers")
    missing = [name for name in names if name not in state]
    if missing:
        raise ValueError(
            f"loader state: {missing[0]} is missing; the state has {', '.join(map(str, state)) or 'nothing'}. If it "
            "was saved by another kind of loader, keep the config's data sections as they were, or load the weights "
            "alone (load_module_only=True)"
        )
    for name in names:
        value = state[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
            raise ValueError(
                f"loader state: {name} must be a whole number of at least 0 and at most 2**62, got {value!r}; "
                f"the state has {', '.join(map(str, state))}"
            )
    return [state[name] for name in names]


def check_below(name: str, value: int, limit: int, what: str) -> None:
    """Raise ValueError unless a number of a saved state is below `limit`."""
    if value >= limit:
        raise ValueError(f"loader state: {name} is {value}, which is not below the {limit} {what}")


def nothing_to_do() -> None:
    """Commit of a loader without state."""


def named_rehearsal(holder: Any, state: Any, name: str) -> Callable[[], None]:
    """Call `trial_load` on an object of the caller; errors become a ValueError that names it."""
    try:
        return trial_load(holder, state)
    except Exception as error:  # of the caller's code
        refusal = f"{type(holder).__name__}.load_state_dict refuses it: {type(error).__name__}: {error}"
        raise ValueError(f"loader state: {name}: {refusal}") from error
