"""One warm process from outside: start, stack, end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zcomm.testing.process import Rank, _without_harness, _without_main_module
from zcomm.testing.rank import __file__ as harness


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    started = Rank.start(tmp_path / "stack")
    started.await_ready()
    yield started
    started.kill()
    started.bury()


def test_an_idle_rank_shows_its_stack_and_can_be_asked_again(rank: Rank) -> None:
    assert "most recent call first" in rank.stack()
    assert "most recent call first" in rank.stack()


def test_a_rank_that_is_gone_has_an_epitaph_and_no_stack(rank: Rank) -> None:
    rank.kill()
    assert "killed by SIGKILL (signal 9)" in rank.epitaph()
    assert rank.stack() == "(the process is gone)"


def test_frames_below_the_users_function_are_dropped() -> None:
    stack = "\n".join(
        [
            "Thread 0x1 (most recent call first):",
            '  File "/x/helper.py", line 1 in other',
            "",
            "Current thread 0x2 (most recent call first):",
            '  File "/x/test.py", line 5 in user',
            f'  File "{harness}", line 80 in _run',
            '  File "/usr/lib/process.py", line 1 in run',
        ]
    )
    assert _without_harness(stack).splitlines()[-1] == '  File "/x/test.py", line 5 in user'
    assert "helper.py" in _without_harness(stack)


def test_the_main_module_is_back_even_after_an_error() -> None:
    main = sys.modules["__main__"]
    with pytest.raises(KeyError), _without_main_module():
        assert sys.modules["__main__"] is not main
        raise KeyError
    assert sys.modules["__main__"] is main
