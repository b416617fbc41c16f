"""Order and text of reports."""

from __future__ import annotations

import pytest

import zcomm
from zcomm.testing.failure import Ending, RankFailed, RankReport, describe, is_lost_peer


def test_the_root_cause_is_first_and_lost_connections_are_last() -> None:
    reports = [
        RankReport(0, Ending.LOST_PEER, "reset", "RuntimeError"),
        RankReport(1, Ending.RETURNED, ""),
        RankReport(2, Ending.HUNG, "stack"),
        RankReport(3, Ending.RAISED, "cause", "ValueError"),
        RankReport(4, Ending.DIED, "killed"),
    ]
    error = RankFailed("fn", 5, reports, ": note")
    assert [report.rank for report in error.reports] == [4, 3, 2, 0, 1]
    assert str(error).splitlines() == [
        "fn failed on 5 ranks: note",
        "--- rank 4 died:",
        "killed",
        "--- rank 3 raised ValueError:",
        "cause",
        "--- rank 2 was still running; its Python stack:",
        "stack",
        "--- rank 0 lost its peers (RuntimeError):",
        "reset",
        "--- returned normally: rank 1",
    ]


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"), True),
        (RuntimeError("Connection closed by peer"), True),
        (zcomm.CollectiveFailed("all_reduce failed"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("Connection reset by peer"), False),
    ],
)
def test_a_lost_connection_differs_from_an_own_fault(error: Exception, lost: bool) -> None:
    assert is_lost_peer(error) is lost


class Unprintable:
    def __repr__(self) -> str:
        raise KeyError("no repr")


def failing(value: object, long: str) -> None:
    raise AssertionError  # as a bare assert does where pytest does not rewrite it


def test_a_bare_assert_is_described_with_its_locals_and_long_ones_are_cut() -> None:
    try:
        failing(Unprintable(), "x" * 1000)
    except AssertionError as error:
        text = describe(error, hide="nothing")
    assert "where value = <repr failed: KeyError>" in text
    assert "where long = 'xxx" in text
    assert len(text) < 1200


def test_an_assert_with_a_message_needs_no_locals() -> None:
    text = describe(AssertionError("said it"), hide="nothing")
    assert "said it" in text
    assert "where" not in text
