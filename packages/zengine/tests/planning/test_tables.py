"""Text for people: aligned, without trailing blanks."""

from __future__ import annotations

import pytest

from zengine.planning.tables import columns, gib, ranks, section, wrapped


def test_columns_are_aligned_and_numbers_stand_to_the_right() -> None:
    table = [("a", "1"), ("long name", "1,000")]
    assert columns(table) == ["a          1", "long name  1,000"]
    assert columns(table, right=1) == ["a              1", "long name  1,000"]
    assert columns(table, right=-1) == columns(table, right=1)
    assert columns([]) == []


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0.0 MiB"), (2**20, "1.0 MiB"), (2**30, "1.00 GiB"), (2**45, "32,768.00 GiB")]
)
def test_sizes(size: int, text: str) -> None:
    assert gib(size) == text


def test_sections_lists_and_counts() -> None:
    assert section("title", ["one", ""]) == "title\n  one\n"
    lines = list(wrapped("word " * 40))
    assert [line[:2] for line in lines] == ["- ", "  "]
    assert (ranks(1), ranks(2)) == ("1 rank", "2 ranks")
