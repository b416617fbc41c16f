"""One warm process from outside: start, stack, end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zcomm.testing import preload
from zcomm.testing.process import Rank, _user_frames, _without_main_module
from zcomm.testing.rank import __file__ as harness


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    started = Rank.start(tmp_path / "stack")
    started.await_ready()
    yield started
    started.kill()
    started.join()


def test_an_idle_rank_answers_that_it_is_idle_and_can_be_asked_again(rank: Rank) -> None:
    assert rank.stack() == "(not inside the function)"
    assert rank.stack() == "(not inside the function)"


def test_sending_to_a_rank_that_is_gone_is_no_error(rank: Rank) -> None:
    rank.kill()
    rank.exit_report()
    rank.send(b"anybody there?")
    rank.send(b"anybody there?")


def test_a_rank_that_is_gone_has_an_epitaph_and_no_stack(rank: Rank) -> None:
    rank.kill()
    assert "killed by SIGKILL (signal 9)" in rank.exit_report()
    assert rank.stack() == "(the process is gone)"


def test_frames_below_the_users_function_are_dropped() -> None:
    stack = "\n".join(
        [
            "Thread 0x1 (most recent call first):",
            '  File "/x/helper.py", line 1 in other',
            "",
            "Current thread 0x2 (most recent call first):",
            '  File "/x/test.py", line 5 in user',
            f'  File "{harness}", line 80 in call',
            '  File "/usr/lib/process.py", line 1 in run',
        ]
    )
    assert _user_frames(stack) == "\n".join(stack.splitlines()[:5])


def test_a_thread_that_is_only_the_harness_is_left_out() -> None:
    assert _user_frames(f'Thread 0x1:\n  File "/x/c.py", line 1 in recv\n  File "{harness}", line 9 in serve') == ""


def test_the_main_module_is_back_even_after_an_error() -> None:
    main = sys.modules["__main__"]
    with _without_main_module():
        assert sys.modules["__main__"] is not main
    with pytest.raises(KeyError), _without_main_module():
        raise KeyError
    assert sys.modules["__main__"] is main


def test_only_names_of_modules_are_preloaded() -> None:
    with pytest.raises(TypeError, match=r"preload takes names of modules, .*, got \['torch'\]"):
        preload(["torch"])  # type: ignore[arg-type]
