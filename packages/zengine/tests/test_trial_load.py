"""A trial load leaves the object unchanged, and commits later."""

from __future__ import annotations

from typing import Any

import pytest

from zengine.trial_load import trial_load


class Picky:
    """Takes positive numbers; remembers too much of the others."""

    def __init__(self) -> None:
        self.number, self.seen = 1, [1]

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.number < 0:
            raise KeyError("number")


def test_a_state_that_is_taken_is_loaded_later() -> None:
    holder = Picky()
    seen = holder.seen
    commit = trial_load(holder, {"number": 5, "seen": [2]})
    assert (holder.number, holder.seen, seen) == (1, [1], [1])
    commit()
    assert (holder.number, holder.seen) == (5, [2])


def test_a_state_that_is_refused_leaves_nothing() -> None:
    holder, reached = Picky(), []
    with pytest.raises(KeyError):
        trial_load(holder, {"number": -5, "more": 1}, restore=lambda: reached.append(holder.number))
    assert vars(holder) == {"number": 1, "seen": [1]}
    assert reached == [1]


def test_a_judge_looks_at_the_object_with_the_state() -> None:
    holder = Picky()

    def judge() -> None:
        raise ValueError(f"{holder.number} is too much")

    with pytest.raises(ValueError, match="9 is too much"):
        trial_load(holder, {"number": 9, "seen": []}, judge)
    assert holder.number == 1
