"""A verb takes the logger's arguments, its own, and no others."""

from __future__ import annotations

import pytest

from zengine.deepspeed.comm.keywords import accept_logging_keywords


@accept_logging_keywords
def verb(tensor: int, log_name: str = "", async_op: bool = False) -> tuple[int, str, bool]:
    """Doc."""
    return tensor, log_name, async_op


def test_its_own_arguments_arrive_and_the_loggers_are_dropped():
    assert verb(1, log_name="a", prof=True, debug="x") == (1, "a", False)
    assert verb(2, "b", async_op=True) == (2, "b", True)
    assert (verb.__name__, verb.__doc__) == ("verb", "Doc.")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("async_opp", r"did you mean async_op=\?"), ("colour", "it takes async_op, log_name, tensor")],
)
def test_an_unknown_one_is_told_with_what_was_meant(name, hint):
    with pytest.raises(TypeError, match=rf"verb\(\) got an unknown keyword {name}=: {hint}"):
        verb(1, **{name: True})
