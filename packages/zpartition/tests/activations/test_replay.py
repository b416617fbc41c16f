"""Each recomputation of a function starts from the same random states."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from zpartition.activations.checkpointing import (
    FORWARD,
    NO_STREAMS,
    RECOMPUTATION,
    Replay,
    is_checkpointing,
    no_span,
    no_synchronization,
)


class Counter:
    """A stream whose only state is how many numbers were drawn."""

    def __init__(self) -> None:
        self.drawn = 5

    def get_states(self) -> int:
        return self.drawn

    def set_states(self, states: int) -> None:
        self.drawn = states

    def draw(self) -> int:
        self.drawn += 1
        return self.drawn


def test_streams_are_set_for_a_recomputation_and_restored_after_it() -> None:
    counter, events = Counter(), []

    @contextmanager
    def span(name: str):
        events.append(name)
        yield
        events.append("end")

    replay = Replay(lambda: (counter.draw(), counter.draw()), counter, lambda: events.append("wait"), span)
    assert replay() == (6, 7)
    counter.drawn = 100
    assert replay() == replay() == (6, 7)
    assert counter.drawn == 100
    assert events[:8] == ["wait", FORWARD, "end", "wait", "wait", RECOMPUTATION, "end", "wait"]


def test_an_error_restores_all_state() -> None:
    counter = Counter()

    def fail() -> None:
        assert is_checkpointing()
        raise ZeroDivisionError(counter.draw())

    replay = Replay(fail, counter, no_synchronization, no_span)
    for wanted in (6, 20):
        with pytest.raises(ZeroDivisionError, match="6"):
            replay()
        assert counter.drawn == wanted
        assert not is_checkpointing()
        counter.drawn = 20
    assert NO_STREAMS.get_states() == {}
