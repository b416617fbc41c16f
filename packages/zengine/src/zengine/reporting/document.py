"""HTML document and its building blocks; all external text is escaped here.

A page is one file: page.css and page.js beside this module are inlined.  It fetches nothing, so it opens from a mail
or a bucket, and a content security policy in its head blocks anything that escaping might miss.

Rejected: Jinja2.  Most of a page is charts, numbers turned into paths, which templates do not help; what is left is
the few functions below, whose arguments mypy checks, where a template prints a missing value as nothing.  It would
be a dependency of every training run, for a page that is written once.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from zengine.reporting.chart import CLIP

__all__ = ["allow_breaks", "bar", "bars", "details", "document", "facts", "section", "shorten", "table", "tiles"]

HERE = Path(__file__).parent
# No network, no frames, no forms; styles and scripts are those of this file.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def document(title: str, sections: Iterable[str]) -> str:
    """Return the whole file.  sections: HTML; title: text."""
    style, script = (HERE / "page.css").read_text("utf-8"), (HERE / "page.js").read_text("utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{style}</style></head>"
        f"<body>{CLIP}<main>{''.join(sections)}</main><script>{script}</script></body></html>\n"
    )


def section(title: str, body: str, *, note: str = "") -> str:
    """Return a card with a heading; "" without a body.  title, note: text; body: HTML."""
    if not body:
        return ""
    lead = f"<p class='note'>{html.escape(note)}</p>" if note else ""
    return f"<section class='card'><h2>{html.escape(title)}</h2>{lead}{body}</section>"


def details(title: str, body: str) -> str:
    """Return a collapsed card.  title: text; body: HTML."""
    return f"<section class='card'><details><summary>{html.escape(title)}</summary>{body}</details></section>"


def tiles(figures: Mapping[str, str]) -> str:
    """Return the key figures by name."""
    cells = ((html.escape(value), html.escape(name)) for name, value in figures.items())
    return (
        f"<div class='tiles'>{''.join(f'<div class=tile><b>{v}</b><span>{n}</span></div>' for v, n in cells)}</div>"
    )


def facts(values: Mapping[str, object]) -> str:
    """Return a table of two columns: name and value."""
    rows = ((allow_breaks(name), html.escape(str(value))) for name, value in values.items())
    return (
        f"<table class='facts'>{''.join(f'<tr><th>{name}</th><td>{value}</td></tr>' for name, value in rows)}</table>"
    )


def table(header: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], *, num_texts: int = 1) -> str:
    """Return a table with a head.  Each row: class and cells as HTML; columns after `num_texts` are numbers."""

    def cells(values: Sequence[str], tag: str) -> str:
        kinds = ("" if i < num_texts else " class=number" for i in range(len(values)))
        return "".join(f"<{tag}{kind}>{value}</{tag}>" for value, kind in zip(values, kinds))

    head = cells([html.escape(name) for name in header], "th")
    body = "".join(f'<tr class="{html.escape(kind)}">{cells(values, "td")}</tr>' for kind, values in rows)
    few = " few" if len(header) <= 4 and num_texts == 1 else ""
    grid = f"<table class='grid'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class='wide{few}'>{grid}</div>"


def bar(share: float, colour: int = 1) -> str:
    """Return a horizontal bar; share: of the full width, from 0 to 1."""
    return bars([(share, colour)])


def bars(parts: Sequence[tuple[float, int]]) -> str:
    """Return adjacent bars: share of the full width and colour of each."""
    widths = ((min(1.0, max(0.0, share)), colour) for share, colour in parts)
    inside = "".join(f'<div class="f{colour}" style="width:{width:.1%}"></div>' for width, colour in widths)
    return f'<div class="track">{inside}</div>'


def shorten(text: str, limit: int = 200) -> str:
    """Return `text` as HTML; a long one is cut and shown in full on hover."""
    if len(text) <= limit:
        return html.escape(text)
    return f'<span title="{html.escape(text[:4000])}">{html.escape(text[:limit])}&hellip;</span>'


def allow_breaks(name: str) -> str:
    """Return a dotted name as HTML with line breaks allowed after dots and underscores."""
    return html.escape(name).replace(".", ".<wbr>").replace("_", "_<wbr>")
