"""Unfreeze sync: ranks compare unfrozen names once a step, and wait only when it is needed."""

from __future__ import annotations

import pytest

import zcomm
from zcomm.testing import run_ranks
from zpartition.unfreeze import UnfreezeSync


def test_alone_there_is_nothing_to_hear() -> None:
    unfreeze_sync = UnfreezeSync(None)
    unfreeze_sync.submit(["a"])
    unfreeze_sync.wait()
    unfreeze_sync.reset()
    assert (unfreeze_sync.names, unfreeze_sync.handle) == (None, None)


def says() -> list[object]:
    seen: list[object] = []
    log: list[object] = []
    mine = ["a"] if zcomm.group_rank() == 0 else []
    unfreeze_sync = UnfreezeSync(zcomm.duplicate_host_group())
    with zcomm.traced(log.append):
        for names in ([], [], ["a", "b"]):
            unfreeze_sync.submit(names)
            unfreeze_sync.submit(names)  # once is enough
        unfreeze_sync.reset()
        seen.append(sum("unfrozen" in str(record) for record in log))
        for again in (unfreeze_sync.wait, unfreeze_sync.reset):
            unfreeze_sync.submit(mine)
            with pytest.raises(ValueError, match="different parameters") as caught:
                again()
            seen.append(str(caught.value).split(": ")[1].split(".")[0])
        unfreeze_sync.submit(["a"])
        unfreeze_sync.wait()
        seen.append(unfreeze_sync.names)
    return seen


def test_differences_are_told_on_all_ranks_and_a_call_follows_them() -> None:
    first, second = run_ranks(says, 2)
    assert first == [2, "a (1 in all)", "a (1 in all)", ("a",)]
    assert second == [2, "none", "none", ("a",)]
