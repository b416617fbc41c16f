"""`zckpt prune`: delete checkpoints that no rule wants."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import CheckpointNotFound
from ..pruning import Pruned, prune
from ..retention import Best, Retention
from .resolve import existing_root
from .status import CORRUPT, OK
from .text import count_text, print_json, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", help="root folder, or URL")
    parser.add_argument("--last", type=int, required=True, metavar="N", help="keep the newest N")
    parser.add_argument("--every", type=int, default=0, metavar="N", help="keep steps divisible by N")
    parser.add_argument(
        "--best",
        action="append",
        default=[],
        metavar="METRIC[:min|max[:N]]",
        help='keep the best N (default 1) by objects["metrics"][METRIC] (default: the least); may be repeated',
    )
    parser.add_argument(
        "--keep-tag", action="append", default=[], metavar="PATTERN", help="keep tags that match; may be repeated"
    )
    parser.add_argument("--dry-run", action="store_true", help="only tell what would go")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace) -> int:
    keep = Retention(
        last=arguments.last,
        every=arguments.every,
        best=[Best.parse(text) for text in arguments.best],
        tags=arguments.keep_tag,
    )
    root, storage = existing_root(arguments.root)
    done = prune(root, keep, storage=storage, dry_run=arguments.dry_run)
    if not done.verdicts and not done.damaged:
        raise CheckpointNotFound(f"{root} holds no committed checkpoint")
    if arguments.json:
        print_json({"root": str(root), "dry_run": arguments.dry_run, **_as_json(done)})
    else:
        _print(done, "would go" if arguments.dry_run else "removed")
    return CORRUPT if done.damaged else OK


def _print(done: Pruned, gone: str) -> None:
    rows = [
        [each.candidate.tag, f"{each.candidate.step:,}", gone if each.goes else "kept", each.reason]
        for each in done.verdicts
    ]
    if rows:
        print("\n".join(table([["tag", "step", "", "because"], *rows], right=(1,))))
    for line in done.damaged:
        print(f"left alone, as it is damaged: {line}")
    print(f"{count_text(len(done.removed), 'checkpoint')} {gone}, {len(done.verdicts) - len(done.removed):,} kept")


def _as_json(done: Pruned) -> dict[str, Any]:
    kept = {each.candidate.tag: each.reason for each in done.verdicts if not each.goes}
    return {"removed": done.removed, "kept": kept, "damaged": done.damaged}
