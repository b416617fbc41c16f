"""The results of the step benchmark as values, text, markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from cases import Case, Limit
from timing import Samples

__all__ = ["FLOOR", "Table", "Verdict", "markdown", "save", "short", "text", "verdicts"]

FLOOR = "floor"
Cells = list[list[str]]


@attrs.frozen(kw_only=True)
class Table:
    """One case at one size and shape."""

    case: Case
    shape: str
    num_tensors: int
    total: int  # parameters
    device: str
    samples: dict[str, Samples]  # the floor first, if there is one
    notes: tuple[str, ...] = ()  # contenders that could not run, with the reason; launches on a GPU
    load: float = 0.0  # load average when the case began
    others: float | None = None  # cores that other processes kept busy meanwhile

    @property
    def title(self) -> str:
        """One line that describes the table."""
        tensors = "flat" if self.num_tensors == 1 else f"in {self.num_tensors} tensors"
        return f"{self.case.title}; {short(self.total)} {tensors}; {self.case.bytes_per_param:g} B/parameter"

    @property
    def environment(self) -> str:
        """The load of the machine."""
        others = "unknown" if self.others is None else f"{self.others:.2f} cores"
        return f"load average {self.load:.1f} at the beginning, other processes {others}"

    def ratio(self, name: str, over: str = FLOOR) -> float | None:
        """Ratio of medians; None if one of them is missing."""
        if name not in self.samples or over not in self.samples:
            return None
        return self.samples[name].median / self.samples[over].median

    def least_ratio(self, name: str, over: str = FLOOR) -> float | None:
        """Ratio of minima; None if one of them is missing."""
        if name not in self.samples or over not in self.samples:
            return None
        return self.samples[name].least / self.samples[over].least


@attrs.frozen(kw_only=True)
class Verdict:
    """The result of a limit for a table."""

    table: Table
    limit: Limit
    ratio: float  # of the medians
    least: float  # of the minima

    @property
    def line(self) -> str:
        """One line of text."""
        shape = "flat" if self.table.num_tensors == 1 else f"{self.table.num_tensors} tensors"
        word = "reached" if self.ratio <= self.limit.at_most else "MISSED"
        what = f"{self.table.case.name} {short(self.table.total)} {shape}"
        found = f"{self.ratio:.3f} of {self.limit.against} (minima {self.least:.3f})"
        return f"{word}: {what}: {found}, limit {self.limit.at_most:.2f}"


def verdicts(tables: Sequence[Table]) -> list[Verdict]:
    """Check every limit that applies to one of the tables."""
    found = []
    for table in tables:
        for limit in table.case.limits:
            speaks = table.device in limit.devices and limit.total in (0, table.total) and table.shape in limit.shapes
            ratio, least = table.ratio("ours", limit.against), table.least_ratio("ours", limit.against)
            if speaks and ratio is not None and least is not None:
                found.append(Verdict(table=table, limit=limit, ratio=ratio, least=least))
    return found


def short(count: int) -> str:
    """1000000 -> 1M."""
    for unit, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= unit and count % (unit // 10) == 0:
            return f"{count / unit:g}{letter}"
    return str(count)


HEAD = ["", "ns/param", "least", "GB/s", "x floor", "x floor, least", "samples"]


def cells(table: Table) -> Cells:
    """The rows of a table, with its header."""
    rows = [HEAD]
    for name, samples in table.samples.items():
        ns = 1e9 / table.total
        speed = table.case.bytes_per_param * table.total / samples.median / 1e9
        ratios = [table.ratio(name), table.least_ratio(name)]
        times = [f"{samples.median * ns:.3g}", f"{samples.least * ns:.3g}", f"{speed:.1f}"]
        rows.append([name, *times, *("" if r is None else f"{r:.2f}" for r in ratios), str(len(samples.seconds))])
    return rows


def text(table: Table) -> str:
    """Text for a terminal."""
    rows = cells(table)
    widths = [max(len(row[k]) for row in rows) for k in range(len(HEAD))]
    lines = [table.title, f"  {table.environment}"]
    for row in rows:
        padded = [row[0].ljust(widths[0]), *(value.rjust(width) for value, width in zip(row[1:], widths[1:]))]
        lines.append("  " + "  ".join(padded))
    return "\n".join([*lines, *(f"  note: {note}" for note in table.notes)])


def markdown(tables: Sequence[Table], facts: dict[str, Any], imports: dict[str, Any] | None) -> str:
    """The whole report."""
    parts = ["# Optimizer steps", "", *(f"- {name}: {_plain(value)}" for name, value in facts.items()), ""]
    parts += [
        "Contenders run round-robin in one process; columns have medians and minima.  GB/s counts the bytes that the",
        "step must move, so a peer that moves more bytes has a lower figure.  `x floor` is the time over that of a",
        "loop that moves these bytes.",
        "",
    ]
    if imports:
        parts += ["## Import", "", *(f"- {name}: {value}" for name, value in imports.items()), ""]
    found = verdicts(tables)
    if found:
        parts += ["## Figures to reach", "", *(f"- {verdict.line}" for verdict in found), ""]
    for table in tables:
        head, *rows = cells(table)
        parts += [
            f"## {table.title}",
            "",
            _row(head),
            _row(["---"] + ["---:"] * (len(head) - 1)),
            *map(_row, rows),
            "",
        ]
        parts += [f"- {table.environment}", *(f"- {note}" for note in table.notes), ""]
    return "\n".join(parts)


def as_json(tables: Sequence[Table], facts: dict[str, Any], imports: dict[str, Any] | None) -> dict[str, Any]:
    """All results, samples included."""
    return {
        "facts": facts,
        "import": imports,
        "tables": [
            {
                "case": table.case.name,
                "title": table.case.title,
                "bytes_per_param": table.case.bytes_per_param,
                "shape": table.shape,
                "num_tensors": table.num_tensors,
                "total": table.total,
                "load": table.load,
                "others": table.others,
                "notes": list(table.notes),
                "seconds": {name: list(samples.seconds) for name, samples in table.samples.items()},
                "x_floor": {name: table.ratio(name) for name in table.samples},
            }
            for table in tables
        ],
        "verdicts": [verdict.line for verdict in verdicts(tables)],
    }


def save(
    folder: Path, name: str, tables: Sequence[Table], facts: dict[str, Any], imports: dict[str, Any] | None
) -> list[Path]:
    """Write NAME.json and NAME.md into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.json", folder / f"{name}.md"]
    files[0].write_text(json.dumps(as_json(tables, facts, imports), indent=1) + "\n", encoding="utf-8")
    files[1].write_text(markdown(tables, facts, imports), encoding="utf-8")
    return files


def _row(values: Sequence[str]) -> str:
    return "| " + " | ".join(values) + " |"


def _plain(value: Any) -> str:
    return ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else str(value)
