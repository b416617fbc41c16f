from __future__ import annotations

import pytest

import check
from check import Outcome, Part


def test_all_parts_run_by_default_and_fast_leaves_out_the_tests() -> None:
    assert [part.name for part in check.select("", fast=False)] == check.NAMES
    assert [part.name for part in check.select("", fast=True)] == check.NAMES[:-1]
    assert check.NAMES == ["format", "lint", "types", "architecture", "caps", "collect", "doctests", "tests"]


def test_only_picks_parts_in_their_own_order() -> None:
    assert [part.name for part in check.select("types, lint", fast=False)] == ["lint", "types"]


def test_weekly_tests_are_run_by_the_parts_that_leave_some_out() -> None:
    weekly = [part.name for part in check.select("", fast=False, weekly=True) if "--weekly" in part.command]
    assert weekly == ["doctests", "tests"]
    assert not [part for part in check.select("", fast=False) if "--weekly" in part.command]


def test_an_unknown_part_is_rejected_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"--only typos: no such part; choose from format, lint, types"):
        check.select("typos,lint", fast=False)


@pytest.mark.parametrize(
    ("name", "output", "quoted"),
    [
        ("lint", "a.py:1: E501\nFound 2 errors.\n[*] fixable", "Found 2 errors."),
        ("types", "Success: no issues found in 9 source files", "Success: no issues found in 9 source files"),
        ("tests", "...\n==== 5 passed, 1 skipped in 3.20s ====", "5 passed, 1 skipped in 3.20s"),
        (
            "collect",
            "\n21/30 tests collected (9 deselected) in 2.65s",
            "21/30 tests collected (9 deselected) in 2.65s",
        ),
        ("tests", "nothing of the kind", ""),
    ],
)
def test_a_result_quotes_the_summary_line(name: str, output: str, quoted: str) -> None:
    (part,) = check.select(name, fast=False)
    assert check.summary_line(part, output) == quoted


def test_a_passing_part_prints_one_line_and_a_failing_one_its_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Part("good", ["-c", "print('2 files left')"], r"\d+ files .*")
    bad = Part("bad", ["-c", "import sys; print('the reason'); sys.exit(1)"], r"x")
    monkeypatch.setattr(check, "PARTS", (good, bad))
    monkeypatch.setattr(check, "NAMES", ["good", "bad"])
    assert check.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("good         ok ")
    assert lines[0].endswith("2 files left")
    assert lines[1].startswith("bad          FAIL")
    assert lines[2] == "the reason"
    assert lines[-1] == "check: FAIL: bad"


def test_a_passing_check_ends_with_ok(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "run", lambda part: Outcome(0, "", 0.0))
    assert check.main(["--only", "lint,types"]) == 0
    assert capsys.readouterr().out.endswith("check: ok\n")
