"""The pieces of pages, and the frame around them."""

from __future__ import annotations

from zengine.reporting.document import allow_breaks, bars, details, document, facts, section, shorten, table, tiles

EVIL = "<img src=x onerror=alert(1)>&\"'"


def test_everything_from_outside_is_escaped() -> None:
    pieces = [
        *(section(EVIL, "<p>", note=EVIL), details(EVIL, ""), tiles({EVIL: EVIL}), facts({EVIL: EVIL})),
        *(shorten(EVIL), shorten(EVIL * 99), allow_breaks(EVIL), table([EVIL], [(EVIL, ["x"])]), document(EVIL, [])),
    ]
    for piece in pieces:
        assert "<img" not in piece
        assert '"onerror' not in piece


def test_sections_without_content_are_absent() -> None:
    assert section("title", "", note="note") == ""


def test_bars_stay_in_their_track() -> None:
    assert bars([(-1, 1), (0.25, 2), (7, 3)]).count("width:") == 3
    assert "width:25.0%" in bars([(0.25, 2)])
    assert "width:100.0%" in bars([(7, 3)])


def test_a_page_forbids_what_it_does_not_need() -> None:
    page = document("title", ["<p>body</p>"])
    assert "default-src 'none'" in page
    assert "<p>body</p>" in page
