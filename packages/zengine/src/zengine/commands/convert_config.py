"""`zengine convert-config old.json > new.json`: an old config in the words of today.

The result has the same plan.  What changed, and why, is on standard error: JSON has no comments.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zengine.commands import CommandError
from zengine.commands.explain import add_fill, filled
from zengine.config import ConfigError, load
from zengine.config.auto import settle
from zengine.config.convert import convert
from zengine.config.source import read
from zengine.config.versions import KEY

if TYPE_CHECKING:
    from zengine.commands import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("convert-config", help="Rewrite an old DeepSpeed config with the keys of today.")
    parser.add_argument("config", help="a JSON file")
    parser.add_argument("--out", default="", metavar="FILE", help="write there; default: standard output")
    parser.add_argument("--from", dest="release", default="", metavar="RELEASE", help='add "config_version": RELEASE')
    parser.add_argument("--drop-refused", action="store_true", help="take out what is refused here, and say so")
    parser.add_argument(
        "--fill-auto", action="store_true", help='write values for "auto", for use without the Trainer'
    )
    add_fill(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the new config, and the changes.  Raises ConfigError for what is refused."""
    auto = filled(arguments.auto)
    document = read(arguments.config)
    if document.problems or not isinstance(document.data, Mapping):
        raise ConfigError(document.source, document.problems)
    if not arguments.drop_refused:
        load(arguments.config, auto=auto)  # what is refused is said with its lines, before anything is written
    drop = frozenset(_refused(arguments.config, auto)) if arguments.drop_refused else frozenset()
    data: Mapping[str, Any] = document.data
    if arguments.fill_auto or auto:
        settled = settle(document, auto).document.data
        data = settled if isinstance(settled, Mapping) else data
    converted = convert(data, drop=drop)
    result = {**({KEY: arguments.release} if arguments.release else {}), **converted.data}
    load(result, auto=auto)
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    if arguments.out:
        _write(Path(arguments.out), text)
    else:
        print(text, end="")
    for change in converted.changes or ("nothing to change",):
        print(change, file=sys.stderr)
    return 0


def _refused(path: str, auto: Mapping[str, Any]) -> list[str]:
    """The keys that a load complains of."""
    try:
        load(path, auto=auto)
    except ConfigError as error:
        return [problem.key for problem in error.problems if problem.key]
    return []


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--out {path}: {error.strerror}") from None
