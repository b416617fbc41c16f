"""Hostfiles and filters."""

from __future__ import annotations

import pytest

from zengine.commands.run import Host, parse_hosts, select_hosts

TEXT = "a slots=4\n\nb slots=2  # fast\n"


def test_a_file_lists_hosts_and_devices() -> None:
    assert parse_hosts(TEXT) == [Host("a", (0, 1, 2, 3), 4), Host("b", (0, 1), 2)]


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", [("a", (0, 1, 2, 3)), ("b", (0, 1))]),
        ("b", "", [("b", (0, 1))]),
        ("a:0,2@b", "", [("a", (0, 2)), ("b", (0, 1))]),
        ("", "a", [("b", (0, 1))]),
        ("", "a:1,3", [("a", (0, 2)), ("b", (0, 1))]),
    ],
)
def test_filters_leave(include: str, exclude: str, left: list[tuple[str, tuple[int, ...]]]) -> None:
    found = select_hosts(parse_hosts(TEXT), include=include, exclude=exclude)
    assert [(host.name, host.devices) for host in found] == left
    assert [host.uses_all for host in found] == [len(host.devices) == host.slots for host in found]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slot=4", 'line 1: "a slot=4" is not "name slots=8"'),
        ("a slots=0", "is not"),
        ("a slots=1\na slots=1", "line 2: a is listed twice"),
        ("# nothing", "the file has no host"),
    ],
)
def test_a_file_that_cannot_be_read_names_the_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"include": "c"}, '"c" is not in the file; its hosts are a, b'),
        ({"include": "b:2"}, "b has devices 0 to 1, not 2"),
        ({"include": "b:x"}, '"b:x" is not "host:0,2"'),
        ({"exclude": "a@b"}, "the filter selects no device"),
        ({"include": "a", "exclude": "b"}, "mutually exclusive"),
    ],
)
def test_a_filter_that_fits_nothing_is_an_error(filters: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_hosts(parse_hosts(TEXT), **filters)
