#!/usr/bin/env python3
"""packages/zengine/CONFIG.md: every key of a config, from the table that reads configs.

python tools/config_reference.py            prints it
python tools/config_reference.py --write    writes it; a test fails while the file is another
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import repo

from zengine.config.grammar.errors import shown
from zengine.config.grammar.table import SECTION_IS_OFF, Key, Section, Support, walk
from zengine.config.keys.root import ROOT
from zengine.config.reading.auto import AUTO
from zengine.config.reading.json_schema import default_of
from zengine.config.reading.versions import CHANGED

PAGE = repo.package_folder("zengine") / "CONFIG.md"
HEAD = """# The keys of a config

Made by `python tools/config_reference.py --write` from the table that reads configs; a test compares. Names and
meanings are DeepSpeed's, with a few keys of ours. `zengine check config.json` reads a file by this table, and
`zengine explain` shows what comes of it. Keys of `optimizer.params` and `scheduler.params` are those of the class
that `type` names.
"""


def page() -> str:
    """The whole text."""
    parts = [HEAD, *honoured(), *others(), *autos(), *versions()]
    return "\n".join(parts) + "\n"


def honoured() -> Iterator[str]:
    """A table for each section with keys that act."""
    sections: dict[str, list[tuple[str, Key]]] = {}
    for path, row in walk(ROOT):
        if isinstance(row, Key) and row.support is Support.HONOURED:
            sections.setdefault(".".join(path[:-1]), []).append((path[-1], row))
    yield "## Keys that act\n"
    for section, keys in sections.items():
        yield f"### {f'`{section}`' if section else 'The top level'}\n"
        yield "| key | value | default | meaning |\n|---|---|---|---|"
        for name, key in keys:
            yield f"| `{name}` | {cell(key.kind.wants)} | {default(key)} | {cell(key.doc)} |"
        yield ""


def others() -> Iterator[str]:
    """Keys that do not act, by what happens to them."""
    yield "## Keys of DeepSpeed that are read and do not act\n"
    yield "Each is checked for spelling and type. Given, it is said once; a section that is switched off says so.\n"
    yield "| key | why it has no effect |\n|---|---|"
    for name, key in keys_of(Support.IGNORED):
        if key.why and key.why != SECTION_IS_OFF:
            yield f"| `{name}` | {cell(key.why)} |"
    yield "\n## Old names\n\n| key | now |\n|---|---|"
    for name, key in keys_of(Support.RENAMED):
        yield f"| `{name}` | `{'.'.join(filter(None, (name.rpartition('.')[0], *key.target)))}` |"
    yield "\n## Refused, with the reason\n"
    yield "Values beside the accepted one stop a run before it starts.\n"
    yield "| key | accepted | otherwise |\n|---|---|---|"
    for path, row in walk(ROOT):
        name = ".".join(path)
        if isinstance(row, Section) and row.rejection:
            yield f"| `{name}` | none | {cell(row.rejection)} |"
        elif isinstance(row, Key) and row.support in (Support.FIXED, Support.REJECTED):
            accepted = " or ".join(f"`{shown(value)}`" for value in row.matching) or "none"
            yield f"| `{name}` | {accepted} | {cell(row.why)} |"
    yield ""


def autos() -> Iterator[str]:
    """Where "auto" may stand."""
    yield '## `"auto"`\n'
    yield "What Hugging Face's integrations fill in is filled in here where they did not.\n"
    yield "| key | becomes | there |\n|---|---|---|"
    for name, auto in AUTO.items():
        value = f"`{shown(auto.value)}`, " if auto.value is not None else ""
        yield f"| `{name}` | {value}{cell(auto.here) or 'an error: it cannot be guessed'} | {cell(auto.by)} |"
    yield ""


def versions() -> Iterator[str]:
    """Defaults that moved."""
    yield "## `config_version`\n"
    yield 'Keys that a file leaves out are as in the release that it names: `"deepspeed-0.18"`, `"zengine-0.2"`.\n'
    yield "| key | before | now | since DeepSpeed |\n|---|---|---|---|"
    for change in CHANGED:
        since = ".".join(map(str, change.since))
        yield f"| `{change.key}` | `{shown(change.before)}` | `{shown(change.now)}` | {since} |"


def keys_of(support: Support) -> Iterator[tuple[str, Key]]:
    """Dotted path and row of every key of a kind."""
    for path, row in walk(ROOT):
        if isinstance(row, Key) and row.support is support:
            yield ".".join(path), row


def default(key: Key) -> str:
    """The default as it would be written; empty where it stands for "not given"."""
    value = default_of(key)
    return "" if value is None else f"`{shown(value)}`"


def cell(text: str) -> str:
    """Text that does not end a cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(repo.ROOT)}")
    if parser.parse_args().write:
        Path(PAGE).write_text(page(), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(repo.ROOT)}")
    else:
        sys.stdout.write(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
