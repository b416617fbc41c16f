"""`zengine convert-config old.json > new.json`: rewrite an old config with current keys.

The result resolves to the same plan.  Changes and their reasons go to standard error, since JSON has no comments.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zengine.commands import CommandError
from zengine.commands.arguments import parse_auto
from zengine.config import ConfigError, load
from zengine.config.grammar.source import read
from zengine.config.reading.auto import settle
from zengine.config.reading.convert import convert
from zengine.config.reading.versions import KEY


def run(arguments: argparse.Namespace) -> int:
    """Print the new config and the changes.  Raises ConfigError for rejected keys."""
    auto = parse_auto(arguments.auto)
    document = read(arguments.config)
    if document.problems or not isinstance(document.data, Mapping):
        raise ConfigError(document.source, document.problems)
    if not arguments.drop_refused:
        load(arguments.config, auto=auto)  # reports rejected keys with their lines before anything is written
    drop = frozenset(_rejected_keys(arguments.config, auto)) if arguments.drop_refused else frozenset()
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
    for change in converted.changes or ("no changes",):
        print(change, file=sys.stderr)
    return 0


def _rejected_keys(path: str, auto: Mapping[str, Any]) -> list[str]:
    """Return the keys that `load` rejects."""
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
