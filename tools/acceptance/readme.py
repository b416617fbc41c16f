"""What the READMEs say about GPUs: blocks between two comments, written from the reports in bench/results/gpu.

    <!-- gpu: written by tools/gpu_acceptance.py --write-readme -->
    ...
    <!-- /gpu -->

The README of the repository has a block about all pieces, that of a package about the pieces that concern it.  A test
compares them with the reports, so no README can claim a run that did not happen.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import repo

from acceptance.places import RESULTS
from acceptance.report import file_name, read_reports
from acceptance.table import PIECES, Piece
from acceptance.verdict import State, Verdict

__all__ = ["BEGIN", "END", "block", "pages", "with_block", "write"]

BEGIN, END = "<!-- gpu: written by tools/gpu_acceptance.py --write-readme -->", "<!-- /gpu -->"
WIDTH = 118


def block(reports: Sequence[Mapping[str, Any]], package: str = "") -> str:
    """Return the text for a package, or for the repository."""
    pieces = [piece for piece in PIECES if not package or package in piece.packages]
    subject = "this package" if package else "this code"
    if reports:
        lines = [line for report in reports for line in _on_device(report, pieces, not package)]
        lines += _wrapped(f"Other CUDA paths of {subject} have not run on a GPU.")
        return "\n".join(lines)
    shown = [piece.title for piece in pieces if piece.on_simulated]
    command = "`tools/gpu_acceptance.py`" if package else "[tools/gpu_acceptance.py](tools/gpu_acceptance.py)"
    passed = f"these pieces of {command} pass: {_listed(shown)}"
    if not package:
        passed = f"{len(shown)} of the {len(pieces)} pieces of {command} pass"
    where = "On a CUDA device simulated in host memory (bits and order; no speed, no NCCL)"
    return "\n".join(_wrapped(f"No GPU has run {subject}. {where} {passed}."))


def _on_device(report: Mapping[str, Any], pieces: Sequence[Piece], is_brief: bool) -> list[str]:
    """Return the lines about one device; brief ones count what has passed."""
    verdicts = {each.piece: each for each in map(Verdict.from_json, report["pieces"])}
    parts = []
    report_page = f"bench/results/gpu/{file_name(report['device'] + '-' + report['date'])}.md"
    for state in State:
        titles = [piece.title for piece in pieces if piece.name in verdicts and verdicts[piece.name].state is state]
        named = f"{len(titles)} of {len(pieces)} pieces" if is_brief and state is State.PASSED else _listed(titles)
        parts += [f"{state.value}: {named}"] if titles else []
    versions = report["versions"]
    parts += [f"[report]({report_page})"] if is_brief else []
    where = f"**{report['device']}**, {report['date']}, torch {versions['torch']}, driver {report['driver']}"
    return _wrapped(f"{where}: {'; '.join(parts)}.", indent="- ")


def _listed(titles: Sequence[str]) -> str:
    return ", ".join(titles) if len(titles) < 2 else f"{', '.join(titles[:-1])} and {titles[-1]}"


def _wrapped(text: str, indent: str = "") -> list[str]:
    later = " " * len(indent)
    wrap = textwrap.TextWrapper(
        WIDTH, initial_indent=indent, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
    return wrap.wrap(text)


def pages() -> dict[Path, str]:
    """Return the READMEs with a block, and the package of each; "" for the repository."""
    packages = {name: repo.package_folder(name) / "README.md" for name in repo.PACKAGES}
    return {repo.ROOT / "README.md": "", **{path: name for name, path in packages.items()}}


def with_block(text: str, written: str) -> str:
    """Return a page with its block replaced.  Raises ValueError for a page without the two comments."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"a README has no block about GPUs: put these two lines where it belongs\n{BEGIN}\n{END}")
    return f"{before}{BEGIN}\n{written}\n{END}{after}"


def write(folder: Path = RESULTS) -> list[str]:
    """Write all blocks; return the pages that changed."""
    changed = []
    reports = read_reports(folder)
    for path, package in pages().items():
        text = path.read_text(encoding="utf-8")
        new = with_block(text, block(reports, package))
        if new != text:
            path.write_text(new, encoding="utf-8")
            changed.append(path.relative_to(repo.ROOT).as_posix())
    return changed
