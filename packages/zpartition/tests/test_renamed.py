"""Public names of 0.2 raise an error that names the new one."""

from __future__ import annotations

import pytest

import zpartition


@pytest.mark.parametrize(("old", "new"), zpartition.RENAMED.items())
def test_an_old_name_is_answered_with_the_new_one(old: str, new: str) -> None:
    assert hasattr(zpartition, new)
    with pytest.raises(AttributeError, match=f"zpartition.{old} is now called zpartition.{new}"):
        getattr(zpartition, old)


def test_a_name_that_never_was_has_none() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        zpartition.nothing  # noqa: B018
