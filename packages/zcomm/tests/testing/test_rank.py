"""The inside of a rank, run in this process where that is harmless."""

from __future__ import annotations

import signal

from zcomm.testing import rank, run_ranks


def test_the_stack_signal_is_one_that_programs_do_not_use() -> None:
    assert rank.DUMP_SIGNAL not in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGALRM, signal.SIGHUP)


def rank_ignores_interrupts() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_an_interrupt_from_the_keyboard_is_left_to_the_parent() -> None:
    assert run_ranks(rank_ignores_interrupts, 1) == [True]
