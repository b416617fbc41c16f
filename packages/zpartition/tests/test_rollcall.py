"""The ranks hear of each other once a step, and wait for nobody before."""

from __future__ import annotations

import pytest

import zcomm
from zcomm.testing import run_ranks
from zpartition.rollcall import RollCall


def test_alone_there_is_nothing_to_hear() -> None:
    roll = RollCall(None)
    roll.tell(["a"])
    roll.hear()
    roll.turn()
    assert (roll.names, roll.handle) == (None, None)


def says() -> list[object]:
    seen: list[object] = []
    log: list[object] = []
    mine = ["a"] if zcomm.group_rank() == 0 else []
    roll = RollCall(zcomm.host_twin())
    with zcomm.traced(log.append):
        for names in ([], [], ["a", "b"]):
            roll.tell(names)
            roll.tell(names)  # once is enough
        roll.turn()
        seen.append(sum("unfrozen" in str(record) for record in log))
        for again in (roll.hear, roll.turn):
            roll.tell(mine)
            with pytest.raises(ValueError, match="different parameters") as caught:
                again()
            seen.append(str(caught.value).split(",")[2].split(".")[0])
        roll.tell(["a"])
        roll.hear()
        seen.append(roll.names)
    return seen


def test_differences_are_told_on_all_ranks_and_a_call_follows_them() -> None:
    first, second = run_ranks(says, 2)
    assert first == [2, " a (1 in all)", " a (1 in all)", ("a",)]
    assert second == [2, " none", " none", ("a",)]
