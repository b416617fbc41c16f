"""The scanner: JSON exactly, with positions; comments, trailing commas and HJSON besides."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zengine.config.grammar.scan import Document, dotted, scan

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def texts(document: Document) -> list[str]:
    return [str(problem) for problem in document.problems]


@given(value=JSON, indent=st.sampled_from([None, 0, 2]), ascii_only=st.booleans())
@settings(max_examples=60, deadline=None)
def test_it_reads_what_the_standard_parser_reads(value: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    document = scan(text, "x.json")
    assert document.problems == ()
    assert document.data == json.loads(text)
    assert json.dumps(document.data) == json.dumps(json.loads(text))  # types too


def test_every_key_has_its_line_and_column() -> None:
    document = scan('{\n  "a": {"b": 1,\n    "c": [10, {"d": 2}]}\n}', "x.json")
    places = {dotted(path): (place.line, place.column) for path, place in document.places.items()}
    assert places == {
        "a": (2, 3),
        "a.b": (2, 9),
        "a.c": (3, 5),
        "a.c[0]": (3, 11),
        "a.c[1]": (3, 15),
        "a.c[1].d": (3, 16),
    }


def test_a_path_without_a_place_of_its_own_stands_where_its_section_stands() -> None:
    document = scan('{\n "a": {}}', "x.json")
    assert document.place(("a", "b", "c")).line == 2
    assert document.place(("z",)).line == 0


def test_a_repeated_key_is_reported_with_both_lines() -> None:
    document = scan('{"a": {\n"b": 1,\n"b": 2}}', "x.json")
    assert texts(document) == ["x.json:3:1  a.b: given twice, on lines 2 and 3. Keep one of them."]


@pytest.mark.parametrize("comment", ["// why", "# why", "/* why\n not */"])
def test_comments_are_read_over_and_places_stay(comment: str) -> None:
    document = scan(f'{{"a": 1, {comment}\n"b": 2}}', "x.json")
    assert (document.data, document.problems) == ({"a": 1, "b": 2}, ())
    assert (document.place(("b",)).line, document.place(("b",)).column) == (2 + comment.count("\n"), 1)


def test_trailing_commas_are_read_over() -> None:
    document = scan('{"a": [1, 2,],\n"b": 3,\n}', "x.json")
    assert (document.data, document.problems) == ({"a": [1, 2], "b": 3}, ())


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("{a: 1}", {"a": 1}),
        ("{'a': 1}", {"a": 1}),
        ("a: 1\nb: {c: some text\n}", {"a": 1, "b": {"c": "some text"}}),
        ('{\n  # why\n  zero: {stage: 2}\n  "lr": 1e-3 // per step\n}', {"zero": {"stage": 2}, "lr": 0.001}),
        ('{"a": [1\n 2]\n "b": null}', {"a": [1, 2], "b": None}),
    ],
)
def test_hjson_is_read(text: str, data: object) -> None:
    document = scan(text, "x.hjson")
    assert (document.data, document.problems) == (data, ())
    assert document.place(("a",)).origin() == "x.hjson"


def test_a_repeated_key_of_hjson_is_reported_too() -> None:
    assert texts(scan("a: 1\nb: 2\na: 3", "x.hjson")) == ["a: given twice. Keep one of them."]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": True,\n"b": 1}', "x.json:1:7: expected a value, found True; JSON writes true"),
        ('{"a": None\n}', "x.json:1:7: expected a value, found None; JSON writes null"),
        ('{"a": 2 3,\n"b": 1}', 'x.json:1:9: expected "," or "}", found 3'),
    ],
)
def test_a_slip_in_json_is_not_taken_for_text_of_hjson(text: str, message: str) -> None:
    assert texts(scan(text, "x.json")) == [message]


def test_slashes_inside_text_are_no_comment() -> None:
    assert scan('{"a": "http://b # c /* d */"}', "x.json").problems == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": True}', "x.json:1:7: expected a value, found True; JSON writes true"),
        ('{"a": NaN}', "x.json:1:7: expected a value, found NaN; JSON writes a number"),
        ('{"a": }', "x.json:1:7: expected a value, found }"),
        ("{'a' 1}", "x.json:1:2: expected a key in double quotes, found 'a'"),
        ("{a = 1}", "x.json:1:2: expected a key in double quotes, found a"),
        ('{"a" 1}', 'x.json:1:6: expected ":" after the key "a", found 1'),
        ('{"a": 1 "b": 2}', 'x.json:1:9: expected "," or "}", found "b"'),
        ('{"a": 1', 'x.json:1:8: expected "," or "}", found the end of the text'),
        (
            '{"a": "b\n"}',
            "x.json:1:7: invalid text: it does not end on its line, or has a backslash escape that JSON lacks",
        ),
        ('{"a": 01}', "x.json:1:7: expected a value, found 01"),
        ('{"a": 1.}', "x.json:1:7: expected a value, found 1."),
        ('{"a": 1} x', "x.json:1:10: unexpected x after the end of the object"),
        ("[" * 100, "x.json:1:66: nested deeper than 64 levels"),
        ("", "x.json:1:1: expected a value, found the end of the text"),
        ('{"a": 1 /* open}', 'x.json:1:9: expected "," or "}", found /*'),
    ],
)
def test_what_is_not_json_ends_the_scan_at_its_place(text: str, message: str) -> None:
    document = scan(text, "x.json")
    assert texts(document) == [message]
    assert document.data is None


def test_slips_before_the_end_of_the_scan_are_kept() -> None:
    assert len(scan('{"a": 1, "a": 2,\n"b": oops}', "x.json").problems) == 2


def test_a_number_of_absurd_length_is_a_number() -> None:
    assert scan('{"a": ' + "9" * 5000 + "}", "x.json").data == {"a": float("inf")}
