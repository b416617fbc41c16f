"""`zengine report RUN [RUN ...] [--out page.html]`: write one self-contained page about a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from zengine.commands import CommandError
from zengine.reporting import NoRunError, write_report

__all__ = ["run"]


def run(arguments: argparse.Namespace) -> int:
    """Write the page and print its path.  Raises CommandError if there is no run or the page cannot be written."""
    folders: list[Path] = arguments.run_folder
    try:
        out = write_report(folders, arguments.out)
    except (NoRunError, OSError) as error:
        raise CommandError(f"zengine report: {error}") from error
    print(out)
    return 0
