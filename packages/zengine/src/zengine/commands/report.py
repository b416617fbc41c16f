"""`zengine report RUN [RUN ...] [--out page.html]`: one self-contained page from what a run left in its folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from zengine.commands import CommandError
from zengine.reporting import NoRunError, write_report

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = subparsers.add_parser("report", help="write the page of a run: curves, time, memory, config")
    parser.add_argument(
        "run_folder",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folder of a run, the one with events.jsonl in it; several are compared",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page; default: report.html beside the first run's events.jsonl, which replaces no page but its own",
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Write the page and say where it is. Raises CommandError where there is no run, or no place for the page."""
    folders: list[Path] = arguments.run_folder
    try:
        out = write_report(folders, arguments.out)
    except (NoRunError, OSError) as error:
        raise CommandError(f"zengine report: {error}") from error
    print(out)
    return 0
