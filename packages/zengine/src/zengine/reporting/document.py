"""The frame of a page, and the small pieces that pages are made of; everything from outside is escaped here.

A page is one file: page.css and page.js beside this module are written into it.  It fetches nothing, so it opens from
a mail or a bucket, and a policy in its head forbids what an oversight might let in.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from zengine.reporting.chart import CLIP

__all__ = ["bar", "bars", "breakable", "details", "document", "facts", "section", "shortened", "table", "tiles"]

HERE = Path(__file__).parent
# No network, no frames, no forms; styles and scripts are those of this file.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def document(title: str, sections: Iterable[str]) -> str:
    """The whole file. sections: HTML; title: text."""
    style, script = (HERE / "page.css").read_text("utf-8"), (HERE / "page.js").read_text("utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{style}</style></head>"
        f"<body>{CLIP}<main>{''.join(sections)}</main><script>{script}</script></body></html>\n"
    )


def section(title: str, body: str, *, note: str = "") -> str:
    """A card with a heading; "" if there is nothing to show. title, note: text; body: HTML."""
    if not body:
        return ""
    lead = f"<p class='note'>{html.escape(note)}</p>" if note else ""
    return f"<section class='card'><h2>{html.escape(title)}</h2>{lead}{body}</section>"


def details(title: str, body: str) -> str:
    """A card that is closed at first. title: text; body: HTML."""
    return f"<section class='card'><details><summary>{html.escape(title)}</summary>{body}</details></section>"


def tiles(figures: Mapping[str, str]) -> str:
    """The figures to take home, by what they are."""
    cells = ((html.escape(value), html.escape(name)) for name, value in figures.items())
    return (
        f"<div class='tiles'>{''.join(f'<div class=tile><b>{v}</b><span>{n}</span></div>' for v, n in cells)}</div>"
    )


def facts(values: Mapping[str, object]) -> str:
    """Two columns: what it is, and its value."""
    rows = ((breakable(name), html.escape(str(value))) for name, value in values.items())
    return (
        f"<table class='facts'>{''.join(f'<tr><th>{name}</th><td>{value}</td></tr>' for name, value in rows)}</table>"
    )


def table(header: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], *, num_texts: int = 1) -> str:
    """A table with a head; each row: its class, and its cells as HTML.  Columns after `num_texts` are numbers."""

    def cells(values: Sequence[str], tag: str) -> str:
        kinds = ("" if i < num_texts else " class=number" for i in range(len(values)))
        return "".join(f"<{tag}{kind}>{value}</{tag}>" for value, kind in zip(values, kinds))

    head = cells([html.escape(name) for name in header], "th")
    body = "".join(f'<tr class="{html.escape(kind)}">{cells(values, "td")}</tr>' for kind, values in rows)
    few = " few" if len(header) <= 4 and num_texts == 1 else ""
    grid = f"<table class='grid'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class='wide{few}'>{grid}</div>"


def bar(share: float, colour: int = 1) -> str:
    """A horizontal bar; share: of the full width, from 0 to 1."""
    return bars([(share, colour)])


def bars(parts: Sequence[tuple[float, int]]) -> str:
    """Bars one after the other: share of the full width and colour of each."""
    widths = ((min(1.0, max(0.0, share)), colour) for share, colour in parts)
    inside = "".join(f'<div class="f{colour}" style="width:{width:.1%}"></div>' for width, colour in widths)
    return f'<div class="track">{inside}</div>'


def shortened(text: str, limit: int = 200) -> str:
    """`text` as HTML, of which a long one shows its beginning, and all of it to a pointer that rests on it."""
    if len(text) <= limit:
        return html.escape(text)
    return f'<span title="{html.escape(text[:4000])}">{html.escape(text[:limit])}&hellip;</span>'


def breakable(name: str) -> str:
    """A dotted name as HTML that may be broken after its dots and underscores."""
    return html.escape(name).replace(".", ".<wbr>").replace("_", "_<wbr>")
