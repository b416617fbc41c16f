"""Reports: JSON for programs and Markdown for people, one pair for each device and day."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from acceptance.table import PIECES
from acceptance.verdict import Figure, Judgement, State, Verdict

__all__ = ["file_name", "markdown", "read_reports", "write_report"]

MOST_BYTES = 100_000  # of a report's JSON


def write_report(folder: Path, facts: Mapping[str, Any], verdicts: Mapping[str, Verdict]) -> list[Path]:
    """Write both files, and return their paths.  A piece without a verdict was not asked for."""
    whole = [
        verdicts.get(piece.name, Verdict(piece=piece.name, state=State.NOT_RUN, reason="it was not asked for"))
        for piece in PIECES
    ]
    date = datetime.date.today().isoformat()
    name = file_name(f"{facts['device']}-{date}")
    folder.mkdir(parents=True, exist_ok=True)
    text, data = folder / f"{name}.md", folder / f"{name}.json"
    plain = {**facts, "date": date, "pieces": [verdict.to_json() for verdict in whole]}
    content = json.dumps(plain, indent=1) + "\n"
    if len(content) > MOST_BYTES:
        raise ValueError(f"the report has {len(content)} bytes; {MOST_BYTES} are allowed")
    data.write_text(content)
    text.write_text(markdown(plain))
    return [text, data]


def file_name(text: str) -> str:
    """Return a text as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def read_reports(folder: Path) -> list[dict[str, Any]]:
    """Return the reports of GPUs in a folder: the newest of each device, sorted by name."""
    newest: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*[0-9].json")):  # not the records beside them
        report = json.loads(path.read_text())
        if not report["is_simulated"] and report["date"] >= newest.get(report["device"], report)["date"]:
            newest[report["device"]] = report
    return [newest[device] for device in sorted(newest)]


def markdown(report: Mapping[str, Any]) -> str:
    """Return the page of a report."""
    verdicts = [Verdict.from_json(each) for each in report["pieces"]]
    titles = {piece.name: piece.title for piece in PIECES}
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [f"# Acceptance on {report['device']}, {report['date']}", ""]
    lines += [f"Made by `python tools/gpu_acceptance.py` at commit {report['commit']}, sources {report['sources']}."]
    lines += [
        f"Capability {report['capability']}, {report['memory_gib']} GiB, driver {report['driver']}; {versions}.",
        *(f"{note}." for note in report["notes"]),
    ]
    if report["is_simulated"]:
        lines += ["", "A device simulated in host memory: bits and order are checked, and nothing is measured."]
    lines += ["", "| piece | verdict | seconds | what held, or why not |", "|---|---|---:|---|"]
    for verdict in verdicts:
        said = "; ".join([verdict.reason, *verdict.checks]).strip("; ")
        title = titles.get(verdict.piece, verdict.piece)
        lines += [f"| {title} | {verdict.state.value} | {verdict.seconds:.0f} | {_cell(said)} |"]
    figures = [(verdict.piece, figure) for verdict in verdicts for figure in verdict.figures]
    if figures:
        lines += ["", "| piece | figure | unit | measured | predicted | peer | ratio | goal | verdict |"]
        lines += ["|---|---|---|---:|---:|---:|---:|---|---|", *(_row(piece, figure) for piece, figure in figures)]
    for verdict in verdicts:
        if verdict.output:
            lines += ["", f"## Output of {verdict.piece}", "", "```", *_fenced(verdict.output), "```"]
    return "\n".join(lines) + "\n"


def _row(piece: str, figure: Figure) -> str:
    values = [_number(value) for value in (figure.measured, figure.predicted, figure.peer, figure.ratio)]
    if figure.judgement is Judgement.NOT_MEASURED:
        values[0] = Judgement.NOT_MEASURED.value
    cells = [piece, figure.name, figure.unit, *values, figure.bounds, figure.judgement.value]
    return f"| {' | '.join(map(_cell, cells))} |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


def _fenced(output: str) -> Sequence[str]:
    return [line.replace("```", "'''").rstrip() for line in output.splitlines()]
